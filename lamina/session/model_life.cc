// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/model_life.h"

#include <string>
#include <vector>

#include "lamina/session/sharding.h"

namespace lamina::session {

void begin_life(Session& session, ModelFace& face) {
  const auto proposal = face.propose();
  face.take_cut(model::agree_on_cut(face.tree(), proposal, session.partition(),
                                    session.members(topology::Group::kWorld), session.mailbox(), session.patience()));
  std::vector<std::string> modules;
  for (const auto& node : face.tree().nodes()) modules.push_back(node.name);
  face.take_values(give_values(session, face.table(), modules, face.value_hooks(), face.portion_bytes()));
  face.trim_optimizers();
  face.watch();
  face.route();
  face.load();
  face.settle();
}

}  // namespace lamina::session
