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

TEST_F(DistributionTest, WrongInputIsNamed) {
  EXPECT_THROW(read_distribution("/no/such.json"), base::ConfigError);
  EXPECT_THAT(complaint("{"), HasSubstr("is not valid JSON: line 1"));
  EXPECT_THAT(complaint("a: [", "d.yml"), HasSubstr("is not valid YAML: line"));
  EXPECT_THAT(complaint("[]"), HasSubstr("the whole is to be a dictionary, not []"));
  EXPECT_THAT(complaint(R"({"mpy": {}})"), HasSubstr("mpy is not known"));
  EXPECT_THAT(complaint(R"({"mpi": {"processes_per_host": 0}})"), HasSubstr("mpi.processes_per_host"));
  EXPECT_THAT(complaint(R"({"mpi": {"processes": 1}})"), HasSubstr("mpi.processes is not known"));
  EXPECT_THAT(complaint(R"({"mpi": {"enabled": 1}})"), HasSubstr("mpi.enabled"));
  EXPECT_THAT(complaint(R"({"smdistributed": {"dataparallel": {}}})"), HasSubstr("smdistributed.dataparallel"));
  EXPECT_THAT(complaint(R"({"smdistributed": {"modelparallel": {"parameters": {"partition": 2}}}})"),
              HasSubstr("partition"));
}

}  // namespace
}  // namespace lamina::launch
