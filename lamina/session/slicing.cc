// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/slicing.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <sstream>
#include <vector>

#include "lamina/model/agreement.h"
#include "lamina/model/values.h"
#include "lamina/tensor_parallel/slices.h"
#include "lamina/tensor_parallel/team.h"
#include "lamina/value/guarded.h"
#include "lamina/value/released.h"
#include "lamina/value/slice_shapes.h"

namespace lamina::session {
namespace {

using topology::Group;

std::string description(std::span<const ToSlice> parameters) {
  std::ostringstream lines;
  for (const auto& [name, tensor, slicing] : parameters) {
    lines << name << ": " << tensor.sizes() << " " << tensor.scalar_type() << ", cut along " << slicing.dim << " by";
    for (const auto& section : slicing.sections) lines << " " << section.extent << "/" << section.unit;
    lines << "\n";
  }
  return lines.str();
}

// Does so where values are to come.
void slice_shapes(Session& session, std::span<const ToSlice> parameters) {
  for (const auto& [name, tensor, slicing] : parameters) {
    const auto whole = at::empty(tensor.sizes(), at::TensorOptions(tensor.dtype()).device(at::kMeta));
    value::become_slice(tensor, name, slice_of(session, whole, slicing).sizes());
  }
}

}  // namespace

void slice(Session& session, std::span<const ToSlice> parameters,
           const std::function<void(std::span<const at::Tensor>)>& make) {
  const auto world = session.members(Group::kWorld);
  model::agree({description(parameters), "", {}}, world, session.mailbox(), session.patience());
  if (std::ranges::all_of(parameters, [](const auto& each) { return value::is_released(each.tensor); })) {
    return slice_shapes(session, parameters);
  }
  std::vector<model::Parameter> rows;
  for (const auto& [name, tensor, slicing] : parameters) {
    rows.push_back(model::whole_in(base::Partition(0), name, tensor, /*buffer=*/false, 1));
  }
  const model::ParameterTable table(std::move(rows), base::Partition(0), 1);
  model::ValueHooks hooks;
  hooks.make = [&](std::span<const model::Parameter> portion) {
    std::vector<at::Tensor> tensors;
    for (const auto& row : portion) tensors.push_back(row.tensor);
    make(tensors);
  };
  hooks.why = [](const auto&) { return std::string(); };
  hooks.given = [&](std::span<const model::Parameter> portion) {
    for (const auto& row : portion) {
      const auto& [name, whole, slicing] = parameters[static_cast<std::size_t>(&row - table.all().data())];
      const auto shape = whole.sizes().vec();
      auto tensor = row.tensor;
      tensor.set_data(slice_of(session, tensor.detach(), slicing));
      value::guard(tensor, name, shape);
    }
  };
  model::give_values(table, {world, {}}, session.mailbox(), session.patience(), hooks);
}

void run_step(Session& session, pipeline::StepSpec spec, const std::function<void(pipeline::StepSpec)>& run) {
  auto* team = session.known_team();
  if (team == nullptr) return run(std::move(spec));
  spec.check_others = [team] { team->require_nobody_failed(); };
  team->together([&] { run(std::move(spec)); });
}

void note_call(Session& session, const tensor_parallel::ModelCall& call) {
  session.team()->note_given(tensor_parallel::hashes_of(call));
}

at::Tensor whole_of(Session& session, const at::Tensor& slice, const layout::Slicing& slicing) {
  return tensor_parallel::whole_of(*session.team(), slice, slicing);
}

std::vector<tensor_parallel::Compared> compare_slices(Session& session, std::span<const tensor_parallel::Twice> values,
                                                      double tolerance) {
  return tensor_parallel::compare(*session.team(), values, tolerance);
}

at::Tensor slice_of(Session& session, const at::Tensor& whole, const layout::Slicing& slicing) {
  const auto& topology = session.topology();
  return tensor_parallel::slice_of(whole, slicing, topology.index(Group::kTp, session.world().rank),
                                   topology.size(Group::kTp));
}

}  // namespace lamina::session
