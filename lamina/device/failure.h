// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <functional>
#include <string>

// [Note: failed kernels] A kernel runs later than it is called. One that fails is told by a later call, which may be
// any, and by each one after that: this process has lost its device. So the rank's job is over. Whoever meets such an
// error asks failure(): by that the other ranks hear of it, which would wait for this one. From then on nothing
// waits for the device, and what lies on it is left to the end of the process: to free it may be one more error, in a
// place that cannot throw.
namespace lamina::devices {

// The error with which the rank's device has failed; nullptr where it goes on. It asks the device, and waits for
// nothing. The first one to find it tells whoever watches. From any thread.
std::exception_ptr failure();

// Asks no device: whether failure() has found one.
bool is_failed();

// `hear` is called with what the device says, once, in the thread that finds it; nullptr: nobody hears any more, when
// this returns. The one that hears does not call this one, and waits for nothing.
void watch_failures(std::function<void(const std::string& what)> hear);

// Words on where to look for the kernel that has failed.
std::string where_to_look();

}  // namespace lamina::devices
