// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lamina/environment/world.h"

namespace lamina::rendezvous {

// The world, with a MASTER_ADDR at which the other machines find this one. A machine's own name may lead to its
// loopback device, as Debian installs it (127.0.1.1), and a job on several machines meets elsewhere. An address in
// numbers, and "localhost", are taken as they are. Throws base::ConfigError when the name has no address.
environment::World meeting_outside(environment::World world);

}  // namespace lamina::rendezvous
