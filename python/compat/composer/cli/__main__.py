# SPDX-License-Identifier: Apache-2.0
from composer.cli.launcher import main

main()
