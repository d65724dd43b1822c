# SPDX-License-Identifier: Apache-2.0
from lamina import checkpoint as checkpoint
from lamina import checkpoint_sequential as checkpoint_sequential
