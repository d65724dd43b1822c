// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "lamina/base/fd.h"
#include "lamina/environment/job_door.h"
#include "lamina/launch/options/preparation.h"
#include "lamina/launch/ranks/watch.h"

namespace lamina::launch {

// The launcher's part in a job that newcomers join ([Note: newcomers] in session/door.h). Its ranks keep a plate up to
// date, on which stands where the door is. With a secret that other launchers may have, it tells that to whoever asks
// at its port. Nothing of it is secret: the door itself asks for that.
class Doorkeeper {
 public:
  // Throws base::ConfigError where the port that is asked for is not free, StartError.
  Doorkeeper(const Preparation& prepared, std::string witness);

  int plate() const { return file_.get(); }  // for the ranks
  // Nothing is known yet, but the launchers of a job that ranks of this one join.
  void begin() const;
  // The place where it listens: "10.0.0.1 4711"; "": nowhere.
  const std::string& address() const { return address_; }
  // True where the job has ranks of other launchers, as far as its ranks have said.
  bool has_others() const;

  void watch(Watch& watch) const;

 private:
  void answer() const;

  const base::Fd file_;
  const environment::JobDoor first_;  // what stands on the plate when ranks begin
  const environment::ElasticTerms terms_;
  const std::string witness_;
  base::Fd listener_;
  std::string address_;
};

}  // namespace lamina::launch
