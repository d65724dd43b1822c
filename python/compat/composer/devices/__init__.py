# SPDX-License-Identifier: Apache-2.0
from composer.paths import offer, others
from lamina.composer import devices
from lamina.composer.devices import Device, DeviceCPU

offer(__name__, device=devices, device_cpu=devices)
__getattr__ = others(__name__)

__all__ = ["Device", "DeviceCPU"]
