// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "lamina/config/config.h"
#include "lamina/frontend/plan_cuts.h"
#include "lamina/frontend/slices.h"
#include "lamina/session/session.h"
#include "lamina/session/slicing.h"

// A model whose layers are cut over the ranks of a TP_GROUP.
namespace lamina::frontend {

// Layers of a model that are cut.
class SlicedLayers {
 public:
  // Changes nothing. Parameters that are slices `now` count as their wholes. Throws base::UsageError where a layer
  // cannot be cut.
  SlicedLayers(torch::nn::Module& root, Member member, const Slicings& now = {});
  ~SlicedLayers();

  const Slicings& slicings() const { return slicings_; }
  const std::vector<session::ToSlice>& parameters() const { return parameters_; }
  // Says which layers under plans stay whole.
  void tell_of_whole() const;
  // From now on parameters are slices, and layers compute with these.
  void begin();
  // Layers are what they were before that.
  void end();

 private:
  torch::nn::Module& root_;
  const Member member_;
  std::unique_ptr<PlanCuts> planned_;
  Slicings slicings_;
  std::vector<session::ToSlice> parameters_;
  std::set<std::string> names_;  // of layers that are cut
};

// Cuts the layers of a model over TP_GROUP, in place, with the values of world rank 0, or without values where these
// are to come; collective over the world. Nothing is changed unless all can be cut. Gives nothing with one rank. Throws
// base::UsageError where a layer cannot be cut.
std::unique_ptr<SlicedLayers> slice_model(torch::nn::Module& root, session::Session& session);

// Says why the layers of a model, of which these may be cut now, cannot be cut in that layout; "" where they can.
std::string why_not_slices(torch::nn::Module& root, const config::Config& config, SlicedLayers* now);

}  // namespace lamina::frontend
