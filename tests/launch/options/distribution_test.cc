// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/options/distribution.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "lamina/base/error.h"

namespace lamina::launch {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class DistributionTest : public testing::Test {
 protected:
  DistributionTest() { std::filesystem::create_directories(folder_); }
  ~DistributionTest() override { std::filesystem::remove_all(folder_); }

  Distribution read(const std::string& text, const std::string& name = "d.json") const {
    std::ofstream(folder_ + name) << text;
    return read_distribution(folder_ + name);
  }

  std::string complaint(const std::string& text, const std::string& name = "d.json") const {
    try {
      read(text, name);
    } catch (const base::ConfigError& error) {
      return error.what();
    }
    return "no complaint";
  }

  const std::string folder_ = testing::TempDir() + "distribution-" + std::to_string(::getpid()) + "/";
};

constexpr const char* kYaml = R"(
distribution:
  smdistributed:
    modelparallel:
      enabled: true
      parameters:
        partitions: 2
        microbatches: 4
        ddp: true
        pipeline: "interleaved"
        memory_weight: 0.5
  mpi:
    enabled: true
    processes_per_host: 8
    custom_mpi_options: -verbose -x A=1 --mca btl none -x B=x
)";

TEST_F(DistributionTest, YamlAndJsonSayTheSame) {
  const Distribution yaml = read(kYaml, "d.yaml");
  EXPECT_EQ(yaml.processes, 8);
  EXPECT_EQ(yaml.parameters,
            R"({"ddp":true,"memory_weight":0.5,"microbatches":4,"partitions":2,"pipeline":"interleaved"})");
  EXPECT_THAT(yaml.variables, ElementsAre("A=1", "B=x"));
  EXPECT_THAT(yaml.warnings, ElementsAre("mpi.custom_mpi_options: no effect without MPI: -verbose --mca btl none"));
  const Distribution json = read(R"({"smdistributed": {"modelparallel": {"parameters": )" + *yaml.parameters +
                                 R"(}}, "mpi": {"processes_per_host": 8, "custom_mpi_options": "-x A=1 -x B=x"}})");
  EXPECT_EQ(json.processes, yaml.processes);
  EXPECT_EQ(json.parameters, yaml.parameters);
  EXPECT_EQ(json.variables, yaml.variables);
}

TEST_F(DistributionTest, WhatIsSwitchedOffSaysNothing) {
  const Distribution off = read(R"({"smdistributed": {"modelparallel": {"enabled": false, "parameters": {}}},
                                    "mpi": {"enabled": false, "processes_per_host": 8}})");
  EXPECT_EQ(off.processes, std::nullopt);
  EXPECT_EQ(off.parameters, std::nullopt);
}

TEST_F(DistributionTest, KeysOfTheConfigurationAreTakenAsTheyAre) {
  const auto keys = read("partitions: 2\nmicrobatches: 4\n", "d.yaml");
  EXPECT_EQ(keys.parameters, R"({"microbatches":4,"partitions":2})");
  EXPECT_EQ(keys.processes, std::nullopt);
  EXPECT_EQ(read(R"({"enabled": true, "parameters": {"ddp": true}})").parameters,
            R"({"enabled":true,"parameters":{"ddp":true}})");
}

TEST_F(DistributionTest, WrongInputIsNamed) {
  EXPECT_THROW(read_distribution("/no/such.json"), base::ConfigError);
  EXPECT_THAT(complaint("{"), HasSubstr("is not valid JSON: line 1"));
  EXPECT_THAT(complaint("a: [", "d.yml"), HasSubstr("is not valid YAML: line"));
  EXPECT_THAT(complaint("[]"), HasSubstr("the whole is to be a dictionary, not []"));
  EXPECT_THAT(complaint(R"({"mpy": {}})"), HasSubstr("mpy: {} is not allowed, there is no such key"));
  EXPECT_THAT(complaint(R"({"mpi": {}, "partitions": 2})"), HasSubstr("partitions is not known beside"));
  EXPECT_THAT(complaint("partitions: 0", "d.yaml"), HasSubstr("partitions: 0 is not allowed"));
  EXPECT_THAT(complaint(R"({"mpi": {"processes_per_host": 0}})"), HasSubstr("mpi.processes_per_host"));
  EXPECT_THAT(complaint(R"({"mpi": {"processes": 1}})"), HasSubstr("mpi.processes is not known"));
  EXPECT_THAT(complaint(R"({"mpi": {"enabled": 1}})"), HasSubstr("mpi.enabled"));
  EXPECT_THAT(complaint(R"({"smdistributed": {"dataparallel": {}}})"), HasSubstr("smdistributed.dataparallel"));
  EXPECT_THAT(complaint(R"({"smdistributed": {"modelparallel": {"parameters": {"partition": 2}}}})"),
              HasSubstr("partition"));
}

TEST_F(DistributionTest, ReadsWhatStandsForMuchInBoundedMemory) {
  std::string bomb = "a0: &a0 [x]\n";
  for (int i = 1; i < 30; ++i)
    bomb += "a" + std::to_string(i) + ": &a" + std::to_string(i) + " [*a" + std::to_string(i - 1) + ", *a" +
            std::to_string(i - 1) + "]\n";
  EXPECT_THAT(complaint(bomb, "d.yaml"), HasSubstr("it stands for more than 100000 values"));
  std::string words = "a: &a " + std::string(100'000, 'x') + "\nb: [";
  for (int i = 0; i < 1000; ++i) words += "*a, ";
  EXPECT_THAT(complaint(words + "*a]\n", "d.yaml"), HasSubstr("it stands for more than 16777216 bytes"));
  EXPECT_THAT(complaint("a: &a [*a]\n", "d.yaml"), HasSubstr("lists in more than 100 lists"));
  EXPECT_THAT(complaint(std::string(200'000, '['), "d.yaml"), HasSubstr("is not valid YAML"));
  EXPECT_THAT(complaint("? [a]\n: b\n", "d.yaml"), HasSubstr("a key is to be a word"));
  EXPECT_THAT(complaint(std::string(200'000, '[')), HasSubstr("lists in more than 100 lists"));
  EXPECT_THAT(complaint(std::string(2 << 20, ' ')), HasSubstr("it has more than 1048576 bytes"));
}

}  // namespace
}  // namespace lamina::launch
