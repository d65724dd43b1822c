// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/model_life.h"

#include <exception>
#include <string>
#include <typeinfo>
#include <vector>

#include "lamina/faces/sayings.h"
#include "lamina/messaging/agreement.h"
#include "lamina/session/sharding.h"
#include "lamina/verification/run_recorder.h"

namespace lamina::session {

void begin_life(Session& session, ModelFace& face) {
  if (!session.half_cut().empty()) throw faces::refusal("half-cut", session.half_cut());
  const auto world = session.members(topology::Group::kWorld);
  const auto differences = messaging::differing_arguments(session.mailbox(), world, "DistributedModel()",
                                                          face.arguments(), session.patience());
  if (!differences.empty()) throw faces::refusal("arguments-differ", differences);
  const auto proposal = face.propose();
  const auto agreed =
      model::agree_on_cut(face.tree(), proposal, session.partition(), world, session.mailbox(), session.patience());
  require_persistent(session.config(), face.tree());
  const auto units = units_of(session.config(), face.tree(), agreed.cut);
  face.take_cut(agreed);
  std::vector<std::string> modules;
  for (const auto& node : face.tree().nodes()) modules.push_back(node.name);
  const auto& recorder = session.run_recorder();
  if (recorder && !recorder->is_over()) session.job().call_hooks().add(recorder, modules);
  try {
    face.take_values(
        give_values(session, face.table(), units, face.value_hooks(), face.portion_bytes(), face.values_follow()));
    // One rank alone may have what cannot be trimmed; the others would wait for it in the step.
    messaging::act_together(session.mailbox(), world, [&] { face.trim_optimizers(); }, session.patience());
    face.watch();
    face.route();
  } catch (const std::exception& error) {
    if (!face.table().whole_everywhere()) session.note_half_cut(error.what());
    if (typeid(error) == typeid(base::Error)) throw base::UsageError(error.what());  // another rank's, of Python's
    throw;
  }
  face.load();
  face.settle();
}

}  // namespace lamina::session
