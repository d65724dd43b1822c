# SPDX-License-Identifier: Apache-2.0
from lamina.hugging_face import from_hugging_face, to_hugging_face

translate_hf_state_dict_to_smdistributed_roberta = from_hugging_face
translate_state_dict_to_hf_roberta = to_hugging_face
