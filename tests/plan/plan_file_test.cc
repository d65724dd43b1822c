// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/plan_file.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "lamina/base/error.h"
#include "lamina/plan/planner.h"

namespace lamina::plan {
namespace {

using nlohmann::json;

json node(const json& id, const json& parent, const std::string& name) {
  return {{"id", id},          {"parent", parent},       {"name", name},          {"forward_us", 10},
          {"backward_us", 20}, {"parameter_bytes", 100}, {"activation_bytes", 5}, {"output_bytes", 7}};
}

// A root without work and two leaves.
json pair_of_leaves() {
  json root = node(0, nullptr, "");
  for (const char* key : {"forward_us", "backward_us", "parameter_bytes", "activation_bytes"}) root[key] = 0;
  return {{"partitions", 2},
          {"microbatches", 4},
          {"schedule", "interleaved"},
          {"memory_weight", 0.25},
          {"nodes", {root, node("x", 0, "a"), node(7, 0, "b")}}};
}

std::string error_of(const json& file) {
  try {
    read_plan_file(file.dump());
  } catch (const base::ConfigError& error) {
    return error.what();
  }
  return "no error";
}

TEST(PlanFile, ReadsGoalAndTree) {
  json file = pair_of_leaves();
  file["link"] = {{"latency_us", 3}, {"bytes_per_us", 2}};
  file["shared"] = json::array({json::array({"x", 7})});
  const PlanFile plan = read_plan_file(file.dump());
  EXPECT_EQ(plan.goal.partitions, 2);
  EXPECT_EQ(plan.goal.link.time_us(4), 5);
  EXPECT_EQ(plan.ids, (std::vector<std::string>{"0", "x", "7"}));
  EXPECT_EQ(plan.tree[2].name, "b");
  EXPECT_EQ(plan.tree[2].backward_us, 20);
  EXPECT_EQ(step_planner()->assign(plan.tree, plan.goal), Assignment(3));
}

TEST(PlanFile, AParentMayStandAfterItsChildren) {
  json file = pair_of_leaves();
  std::swap(file["nodes"][0], file["nodes"][2]);
  EXPECT_EQ(read_plan_file(file.dump()).ids, (std::vector<std::string>{"0", "7", "x"}));
}

TEST(PlanFile, WritesThePlanAsJson) {
  const PlanFile file = read_plan_file(pair_of_leaves().dump());
  const auto owners = step_planner()->assign(file.tree, file.goal);
  const json written = json::parse(to_json(file, report(file.tree, owners, file.goal)));
  EXPECT_EQ(written["partition"], json::parse(R"({"0": 0, "x": 0, "7": 1})"));
  EXPECT_EQ(written["stages"][1], json::parse(R"({"partition": 1, "time_us": 30.0, "bytes": 100, "memory_bytes": 210,
                                                 "out_bytes": 7})"));
  EXPECT_EQ(written["predicted_step_us"], 150.0);
  EXPECT_DOUBLE_EQ(written["bubble"], 0.2);
}

TEST(PlanFile, AnErrorNamesNodeAndField) {
  const auto with = [](auto change) {
    json file = pair_of_leaves();
    change(file);
    return error_of(file);
  };
  EXPECT_EQ(with([](json& f) { f["nodes"][1]["forward_us"] = -1; }),
            "node x (\"a\"): forward_us: -1 is not allowed; expected a number from 0 to 1e+15");
  EXPECT_EQ(with([](json& f) { f["nodes"][1].erase("output_bytes"); }), "node x (\"a\"): output_bytes: is missing");
  EXPECT_EQ(with([](json& f) { f["nodes"][2]["parent"] = 9; }), "node 7 (\"b\"): parent: 9 is the id of no node");
  EXPECT_EQ(with([](json& f) { f["nodes"][2]["id"] = "x"; }), "node x (\"b\"): id: stands twice");
  EXPECT_EQ(with([](json& f) { f["nodes"][2]["parent"] = nullptr; }),
            "node 7 (\"b\"): parent: is missing, but node 0 is the root already");
  EXPECT_EQ(with([](json& f) { f["nodes"][0]["parent"] = 7; }),
            "nodes: none is the root; one has to have the parent null");
  EXPECT_EQ(with([](json& f) { f["nodes"][2]["parent"] = 7; }), "node 7 (\"b\"): parent: 7 is, at last, under it");
  EXPECT_EQ(with([](json& f) { f["nodes"][1].erase("id"); }), "nodes[1]: id: is missing");
  EXPECT_EQ(with([](json& f) { f["nodes"][1]["foward_us"] = 1; }), "node x (\"a\"): foward_us: is no key here");
  EXPECT_EQ(with([](json& f) { f["nodes"][1]["parameter_bytes"] = 0.5; }),
            "node x (\"a\"): parameter_bytes: 0.5 is not allowed; expected an integer from 0 to 1000000000000000");
  EXPECT_EQ(with([](json& f) { f["partitions"] = 0; }),
            "partitions: 0 is not allowed; expected an integer from 1 to 65536");
  EXPECT_EQ(with([](json& f) { f["schedule"] = "1f1b"; }),
            "schedule: \"1f1b\" is not allowed; expected \"interleaved\", \"simple\" or \"zero_bubble\"");
  EXPECT_EQ(with([](json& f) { f["link"] = {{"latency_us", 1}}; }), "link: bytes_per_us: is missing");
  EXPECT_EQ(with([](json& f) { f["shared"] = json::array({json::array({0, 5})}); }),
            "shared[0]: id: 5 is the id of no node");
  EXPECT_EQ(with([](json& f) { f["nodes"] = json::array(); }), "nodes: is empty; expected at least the root");
  EXPECT_EQ(with([](json& f) { f["nodes"][1] = 3; }), "nodes[1]: 3 is not an object");
}

// The stretches of both leaves; that of the second reads what `of_second` says.
json with_stretches(const json& of_second) {
  json file = pair_of_leaves();
  file["nodes"][1]["stretches"] = json::array({json::array({1, 10, 20, 7, true, 8, json::array()})});
  file["nodes"][2]["stretches"] = json::array({json::array({2, 10, 20, 7, true, nullptr, of_second})});
  return file;
}

TEST(PlanFile, HasTheValuesThatStretchesReadAndTheWeightPartsOfTheirBackwards) {
  const PlanFile file = read_plan_file(with_stretches(json::array({json::array({1, 7})})).dump());
  EXPECT_EQ(file.tree[1].stretches[0].weights_us, 8);
  EXPECT_EQ(file.tree[1].stretches[0].reads, std::vector<Read>());
  EXPECT_EQ(file.tree[2].stretches[0].weights_us, std::nullopt);
  EXPECT_EQ(file.tree[2].stretches[0].reads, (std::vector<Read>{{1, 7}}));
  json without = pair_of_leaves();
  without["nodes"][1]["stretches"] = json::array({json::array({1, 10, 20, 7, true})});
  EXPECT_EQ(read_plan_file(without.dump()).tree[1].stretches[0].reads, std::nullopt);
}

TEST(PlanFile, AStretchThatReadsALaterOneOrOneThatIsNotThereIsAnErrorThatNamesBoth) {
  const auto reading = [](int at) { return error_of(with_stretches(json::array({json::array({at, 7})}))); };
  EXPECT_EQ(reading(1), "no error");
  EXPECT_EQ(reading(2), "node 7 (\"b\"): stretches: stretch 2 reads stretch 2, which does not come before it");
  EXPECT_EQ(reading(3), "node 7 (\"b\"): stretches: stretch 2 reads stretch 3, which is not there");
  json file = with_stretches(json::array());
  file["nodes"][1]["stretches"][0][6] = json::array({json::array({2, 7})});
  EXPECT_EQ(error_of(file), "node x (\"a\"): stretches: stretch 1 reads stretch 2, which does not come before it");
}

TEST(PlanFile, SaysWhetherItIsOfAGraphOfOperations) {
  json file = pair_of_leaves();
  EXPECT_FALSE(read_plan_file(file.dump()).graph);
  file["graph"] = true;
  EXPECT_TRUE(read_plan_file(file.dump()).graph);
  file["graph"] = "yes";
  EXPECT_NE(error_of(file).find("graph"), std::string::npos);
}

TEST(PlanFile, AStretchOfAnotherFormIsAnError) {
  const auto with = [](const json& stretch) {
    json file = pair_of_leaves();
    file["nodes"][1]["stretches"] = json::array({stretch});
    return error_of(file);
  };
  for (const json& stretch : {R"([1, 10, 20, 7])"_json, R"([1, 10, 20, 7, true, 8])"_json,
                              R"([1, 10, 20, 7, true, 21, []])"_json, R"([1, 10, 20, 7, true, 8, [[0]]])"_json,
                              R"([1, 10, 20, 7, true, 8, [[0, -1]]])"_json, R"([1, 10, 20, 7, true, 8, 0])"_json}) {
    EXPECT_EQ(with(stretch),
              "node x (\"a\"): stretches: " + stretch.dump() +
                  " is not [at, forward_us, backward_us, value_bytes, works], with or without weights_us, from 0 to "
                  "backward_us or null, and [[at, bytes], ...] of what it reads");
  }
}

TEST(PlanFile, WhatIsNoJsonIsAnError) {
  EXPECT_THROW(read_plan_file("{"), base::ConfigError);
  EXPECT_THROW(read_plan_file("[]"), base::ConfigError);
  EXPECT_THROW(read_plan_file("\xff"), base::ConfigError);
}

}  // namespace
}  // namespace lamina::plan
