// SPDX-License-Identifier: Apache-2.0
#include "lamina/graph/current.h"

#include <array>
#include <atomic>
#include <string>
#include <utility>

#include "lamina/faces/sayings.h"
#include "lamina/graph/step.h"

namespace lamina::graph {
namespace {

std::array<std::atomic<std::shared_ptr<Border>>, 2> borders;  // by Among

std::atomic<std::shared_ptr<Border>>& border_of(Among among) { return borders.at(static_cast<std::size_t>(among)); }

void fail_after(const std::shared_ptr<GraphStep>& first, const std::shared_ptr<GraphStep>& second) {
  first->when_it_fails([weak = std::weak_ptr(second)](const std::exception_ptr& error, const std::string& why) {
    if (const auto step = weak.lock()) step->fail_with(error, why);
  });
}

}  // namespace

std::shared_ptr<Border> current(Among among) {
  auto found = border_of(among).load();
  if (!found) throw faces::refusal("not-initialised", "lamina.init()");
  return found;
}

void set_current(Among among, std::shared_ptr<Border> border) { border_of(among).store(std::move(border)); }

void fail_together(const std::shared_ptr<GraphStep>& one, const std::shared_ptr<GraphStep>& other) {
  fail_after(one, other);
  fail_after(other, one);
}

void fail_before(const std::shared_ptr<GraphStep>& step, const std::shared_ptr<Border>& border) {
  step->when_it_fails([weak = std::weak_ptr(border)](const std::exception_ptr&, const std::string& why) {
    if (const auto other = weak.lock()) other->abandon(why);
  });
}

}  // namespace lamina::graph
