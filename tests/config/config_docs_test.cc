// SPDX-License-Identifier: Apache-2.0
#include <fstream>
#include <sstream>

#include "lamina/base/str.h"
#include "lamina/config/config_keys.h"
#include "tests/config/config_fixture.h"

namespace lamina::config {
namespace {

std::string document() {
  std::ifstream file(LAMINA_SOURCE_DIR "/docs/configuration.md");
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// The row of the table of keys, or nothing.
std::string row(const std::string& text, const std::string& name) {
  const auto begin = text.find(base::str("\n| `", name, "` |"));
  return begin == std::string::npos ? "" : text.substr(begin + 1, text.find('\n', begin + 1) - begin - 1);
}

TEST(ConfigurationDocument, HasARowForEveryKeyWithItsDefault) {
  const std::string text = document();
  for (const Key& key : config_keys()) {
    const std::string line = row(text, key.name);
    ASSERT_NE(line, "") << key.name;
    const Scalar usual = key.write(Config{});
    const bool depends = key.write(with_defaults(Config{})) != usual || key.name == "ddp_dist_backend";
    if (!depends) {
      EXPECT_NE(line.find(base::str("| `", show(usual), "` |")), std::string::npos) << line;
    }
  }
}

TEST(ConfigurationDocument, NamesEveryAliasAndTheToleratedKeys) {
  const std::string text = document();
  for (const char* name :
       {"pipeline", "pipeline_parallel_degree", "delayed_parameter_initialization", "static_mode", "fast_mode",
        "checkpoint_attentions", "_match_weights", "_fp32_grad_accumulation", "trace_device"}) {
    EXPECT_NE(text.find(base::str("`", name, "`")), std::string::npos) << name;
    EXPECT_TRUE(is_tolerated(name) || find_key(canonical_name(name))) << name;
  }
}

}  // namespace
}  // namespace lamina::config
