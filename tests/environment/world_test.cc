// SPDX-License-Identifier: Apache-2.0
#include "lamina/environment/world.h"

#include <map>

#include "tests/config/config_fixture.h"

namespace lamina::environment {
namespace {

using Variables = std::map<std::string, std::string>;

World read(const Variables& variables) {
  return read_world([&](const std::string& name) -> std::optional<std::string> {
    const auto at = variables.find(name);
    return at == variables.end() ? std::nullopt : std::optional(at->second);
  });
}

std::string world_error(const Variables& variables) {
  return config::config_error([&] { read(variables); });
}

Variables launched() {
  return {{"RANK", "3"},
          {"WORLD_SIZE", "4"},
          {"LOCAL_RANK", "1"},
          {"LOCAL_WORLD_SIZE", "2"},
          {"MASTER_ADDR", "host-0"},
          {"MASTER_PORT", "29500"}};
}

TEST(World, WithoutALauncherItIsOneProcess) {
  const World world = read({{"MASTER_ADDR", "elsewhere"}, {"LOCAL_RANK", "5"}});
  EXPECT_EQ(world.rank, base::Rank(0));
  EXPECT_EQ(world.size, 1);
  EXPECT_EQ(world.local_size, 1);
  EXPECT_FALSE(world.launched);
}

TEST(World, IsWhatTheLauncherSays) {
  const World world = read(launched());
  EXPECT_EQ(world.rank, base::Rank(3));
  EXPECT_EQ(world.size, 4);
  EXPECT_EQ(world.local_rank, 1);
  EXPECT_EQ(world.local_size, 2);
  EXPECT_EQ(world.master_addr, "host-0");
  EXPECT_EQ(world.master_port, 29500);
  EXPECT_TRUE(world.launched);
}

TEST(World, KnowsItsMachine) {
  Variables variables = launched();
  EXPECT_EQ(read(variables).node_rank, 1);
  variables["GROUP_RANK"] = "2";
  EXPECT_EQ(read(variables).node_rank, 2);
  variables["NODE_RANK"] = "0";
  EXPECT_EQ(read(variables).node_rank, 0);
}

TEST(World, FourVariablesAreEnough) {
  for (const char* with : {"", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}) {
    Variables four{{"RANK", "3"}, {"WORLD_SIZE", "5"}, {"MASTER_ADDR", "host-0"}, {"MASTER_PORT", "29500"}};
    if (*with != '\0') four[with] = "1";
    EXPECT_EQ(read(four).size, 5);
    EXPECT_EQ(read(four).local_size, 0);
  }
}

TEST(World, EveryMissingVariableIsNamed) {
  const std::string error = world_error({{"RANK", "0"}});
  for (const char* name : {"WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    EXPECT_NE(error.find(std::string("\n  ") + name + " is not set"), std::string::npos) << error;
  }
}

TEST(World, EveryWrongValueIsNamedWithWhatIsAllowed) {
  const std::vector<std::tuple<std::string, std::string, std::string>> wrong{
      {"RANK", "4", "RANK: 4 is not allowed with WORLD_SIZE: 4; expected at most 3"},
      {"RANK", "one", "RANK: \"one\" is not allowed; expected an integer, at least 0"},
      {"RANK", "-1", "RANK: \"-1\" is not allowed; expected an integer, at least 0"},
      {"RANK", "1 ", "RANK: \"1 \" is not allowed; expected an integer, at least 0"},
      {"WORLD_SIZE", "0", "WORLD_SIZE: \"0\" is not allowed; expected an integer, at least 1"},
      {"WORLD_SIZE", "99999999999", "WORLD_SIZE: \"99999999999\" is not allowed"},
      {"LOCAL_RANK", "2", "LOCAL_RANK: 2 is not allowed with LOCAL_WORLD_SIZE: 2; expected at most 1"},
      {"LOCAL_WORLD_SIZE", "5", "LOCAL_WORLD_SIZE: 5 is not allowed with WORLD_SIZE: 4; expected at most 4"},
      {"MASTER_ADDR", "", "MASTER_ADDR: \"\" is not allowed; expected a launcher's value"},
      {"MASTER_PORT", "65536", "MASTER_PORT: \"65536\" is not allowed; expected an integer, from 1 to 65535"},
  };
  for (const auto& [name, value, text] : wrong) {
    Variables variables = launched();
    variables[name] = value;
    const std::string error = world_error(variables);
    EXPECT_EQ(error.find("environment of the launcher: 1 error\n  " + text), 0u) << error;
  }
}

}  // namespace
}  // namespace lamina::environment
