// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lamina/checkpoint/save.h"
#include "lamina/session/session.h"

namespace lamina::session {

// All ranks of the job, as saves and loads know them.
inline checkpoint::Peers peers_of(Session& session) {
  return {session.ranks().everyone(), session.mailbox(), session.patience(), [&session] { session.job().goes_on(); }};
}

}  // namespace lamina::session
