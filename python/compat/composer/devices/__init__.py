# SPDX-License-Identifier: Apache-2.0
from composer.paths import offer, others
from lamina.trainer import devices
from lamina.trainer.devices import Device, DeviceCPU

offer(__name__, device=devices, device_cpu=devices)
__getattr__ = others(__name__)

__all__ = ["Device", "DeviceCPU"]
