# SPDX-License-Identifier: Apache-2.0
from lamina.composer.torch_metrics import *
