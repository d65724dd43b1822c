# SPDX-License-Identifier: Apache-2.0
from lamina.layers.hugging_face.gpt_neo import (
    translate_hf_state_dict_to_smdistributed_gptneo as translate_hf_state_dict_to_smdistributed_gptneo,
)
from lamina.layers.hugging_face.gpt_neo import (
    translate_state_dict_to_hf_gptneo as translate_state_dict_to_hf_gptneo,
)

translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptneo
