# SPDX-License-Identifier: Apache-2.0
from lamina.layers.hugging_face import bert as _encoders

translate_hf_state_dict_to_smdistributed_bert = _encoders.translate_hf_state_dict_to_smdistributed
translate_state_dict_to_hf_bert = _encoders.translate_state_dict_to_hf
