# SPDX-License-Identifier: Apache-2.0
from lamina.composer.loss_functions import *
