// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/Exception.h>

#include <memory>

#include "lamina/value/failure.h"

namespace torch::nn {
class Module;
}

namespace lamina::frontend {

// Adds what is known of an error of the rank's device, once: see [Note: errors of devices].
void explain(c10::OutOfMemoryError& error);
void explain(c10::AcceleratorError& error);
// Adds the name of a module whose forward has thrown it; of modules in one another that of the innermost.
void note_module(c10::OutOfMemoryError& error, const torch::nn::Module& module);

// Runs what may throw such errors.
template <class Work>
decltype(auto) explained(const Work& work) {
  try {
    return work();
  } catch (c10::OutOfMemoryError& error) {
    explain(error);
    throw;
  } catch (c10::AcceleratorError& error) {
    explain(error);
    throw;
  }
}

// Has errors explained that go to other ranks.
std::shared_ptr<value::Failures> explaining_failures();

}  // namespace lamina::frontend
