// SPDX-License-Identifier: Apache-2.0
#include "lamina/dist/local_zero.h"

#include "lamina/dist/current.h"
#include "lamina/dist/dist.h"
#include "lamina/value/failure.h"

namespace lamina::dist {

void share_failures(std::exception_ptr failure) {
  if (failure) {
    const auto described = value::Failures().describe_to_send(failure, base::Rank(get_global_rank()));
    try {
      all_gather_object(value::to_value(described));
    } catch (const std::exception&) {  // the others are gone; the error to look at is this one
    }
    std::rethrow_exception(failure);
  }
  for (const auto& each : all_gather_object(Value())) {
    if (!each.get_if<value::None>()) throw value::RemoteFailure(value::to_failure(each));
  }
}

void run_local_rank_zero_first(const std::function<void()>& body) {
  if (group_for("run_local_rank_zero_first()") == nullptr) return body();
  if (get_local_rank() != 0) {
    share_failures(nullptr);
    return body();
  }
  std::exception_ptr failure;
  try {
    body();
  } catch (...) {
    failure = std::current_exception();
  }
  share_failures(failure);
}

}  // namespace lamina::dist
