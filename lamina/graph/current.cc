// SPDX-License-Identifier: Apache-2.0
#include "lamina/graph/current.h"

#include <atomic>
#include <utility>

#include "lamina/faces/sayings.h"

namespace lamina::graph {
namespace {

std::atomic<std::shared_ptr<Border>> border;

}  // namespace

std::shared_ptr<Border> current() {
  auto found = border.load();
  if (!found) throw faces::refusal("not-initialised", "lamina.init()");
  return found;
}

void set_current(std::shared_ptr<Border> of_session) { border.store(std::move(of_session)); }

}  // namespace lamina::graph
