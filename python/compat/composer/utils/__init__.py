# SPDX-License-Identifier: Apache-2.0
from composer.utils import dist as dist
from composer.utils import reproducibility as reproducibility
