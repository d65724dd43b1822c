# SPDX-License-Identifier: Apache-2.0
from lamina.composer.reproducibility import *
