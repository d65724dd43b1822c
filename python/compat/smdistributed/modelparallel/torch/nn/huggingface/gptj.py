# SPDX-License-Identifier: Apache-2.0
from lamina.layers.hugging_face.gptj import (
    translate_hf_state_dict_to_smdistributed_gptj as translate_hf_state_dict_to_smdistributed_gptj,
)
from lamina.layers.hugging_face.gptj import (
    translate_state_dict_to_hf_gptj as translate_state_dict_to_hf_gptj,
)

translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptj
