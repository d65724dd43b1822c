# SPDX-License-Identifier: Apache-2.0
from lamina.layers.hugging_face.gpt2 import (
    get_hf_gpt2_transformer_layer_hooks as get_hf_gpt2_transformer_layer_hooks,
)
from lamina.layers.hugging_face.gpt2 import (
    translate_hf_block_state_dict_to_smdistributed as translate_hf_block_state_dict_to_smdistributed,
)
from lamina.layers.hugging_face.gpt2 import (
    translate_hf_state_dict_to_smdistributed_gpt2 as translate_hf_state_dict_to_smdistributed_gpt2,
)
from lamina.layers.hugging_face.gpt2 import (
    translate_layer_state_dict_to_hf_gpt2_block as translate_layer_state_dict_to_hf_gpt2_block,
)
from lamina.layers.hugging_face.gpt2 import (
    translate_state_dict_to_hf_gpt2 as translate_state_dict_to_hf_gpt2,
)

translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gpt2
