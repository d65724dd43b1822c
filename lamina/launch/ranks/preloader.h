// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <signal.h>

#include <optional>
#include <string>

#include "lamina/base/fd.h"
#include "lamina/launch/options/preparation.h"
#include "lamina/launch/options/rank_environment.h"
#include "lamina/launch/ranks/guardian.h"
#include "lamina/launch/ranks/rank_process.h"
#include "lamina/launch/ranks/report.h"

namespace lamina::launch {

// [Note: preloader] A child of the guardian that runs Python, has imported the modules of --preload, and makes the
// ranks as copies of itself. For each it forks twice and lets the process between end: the guardian adopts the rank,
// which is then its child like any other, and dies with it. A request is an anonymous file with the rank's words and
// environment. With it come the rank's descriptors, and one end of a link. On that link the rank says its process id
// when it has only to run the program. All of Python's part is in preload.py. Before it is asked for the first rank it
// says that it may be forked: that it has one thread, and no open device. Where it may not, or ends, ranks are started
// as ever.
class Preloader {
 public:
  // Starts it. Throws StartError.
  Preloader(const Preparation& prepared, const Job& job, const sigset_t& mask, const Report& report);
  Preloader(const Preloader&) = delete;
  ~Preloader();  // ends it, and what the imports have started

  // Waits for the imports, as long as ranks may take to begin a step. An exit code if an order came first. Throws
  // ConfigError when a module cannot be imported.
  std::optional<int> load(ControlPipe& control);

  RankProcess start(const RankStart& start);

  pid_t pid() const { return process_ ? process_->pid() : 0; }  // 0 when it has been given up

 private:
  std::optional<pid_t> fork(const RankStart& start);
  void give_up(const std::string& why);
  std::string end() const;

  const Preparation& prepared_;
  const Report& report_;
  base::Fd control_;
  std::optional<RankProcess> process_;
};

}  // namespace lamina::launch
