# SPDX-License-Identifier: Apache-2.0
"""Two ranks that were not started alike."""

import os

import lamina

odd = os.environ["RANK"] == "1"
lamina.init(partitions=2, microbatches=8 if odd else 4, ddp=odd)
