// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "lamina/base/ids.h"
#include "lamina/value/value.h"

// The model as the pipeline knows it: modules that can be called by number. A face adapts its own kind of module to
// this (functions.h adapts C++ functions; the Python face adapts torch.nn.Module).
namespace lamina::model {

// State of the caller's face that a call brings along, in the face's own format; "" for nothing.
struct CallerState {
  std::string state;  // what results depend on, whether or not the module runs under it
  std::string news;   // for the owner's face, which hears it first; no result depends on it
};

class Modules {
 public:
  virtual ~Modules() = default;

  // For messages: "transformer.h.5".
  virtual std::string name(base::ModuleId id) const = 0;

  // True where what it returns must not be predicted from earlier calls.
  virtual bool dynamic(base::ModuleId) const { return false; }

  // Gives what a call of the module brings along. Results are predicted from calls of an equal state, whatever the
  // news.
  virtual CallerState capture_state(base::ModuleId id) = 0;

  // Takes the news that came with a call, before that runs.
  virtual void hear(const std::string& /*news*/) {}

  // True where a call of the module runs in a random stream of its own (runtime/rng_streams.h).
  virtual bool starts_rng_stream(base::ModuleId) const { return false; }

  // How many streams a call of it starts by draws from its caller's: its own, or, for several modules that are called
  // as one, those of each.
  virtual int rng_streams(base::ModuleId id) const { return starts_rng_stream(id) ? 1 : 0; }

  // Runs the module on `arguments` under `state`, in the calling thread, recording a graph where grad mode is on. May
  // throw anything.
  virtual value::Value call(base::ModuleId id, const std::string& state, value::Value arguments) = 0;
};

}  // namespace lamina::model
