# SPDX-License-Identifier: Apache-2.0
"""Names of weights in the models of Hugging Face: the public name of what is in `integrations`."""

from lamina.integrations.hugging_face import from_hugging_face, to_hugging_face

__all__ = ["from_hugging_face", "to_hugging_face"]
