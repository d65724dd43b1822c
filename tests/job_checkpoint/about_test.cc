// SPDX-License-Identifier: Apache-2.0
#include "lamina/job_checkpoint/about.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lamina/base/error.h"
#include "tests/message_of.h"

namespace lamina::job_checkpoint {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::json;

About read(const std::string& text, const AboutWanted& wanted = {}) {
  const auto tensor = [](std::size_t) -> at::Tensor { throw base::InternalError("no tensor is there"); };
  return read_about(Json::parse(text), tensor, wanted);
}

TEST(About, IsReadAsItWasWritten) {
  About about{.lamina = "0.5", .saved_at = "2026-01-02T03:04:05+00:00"};
  about.layout = JobLayout{.pp = 2, .rdp = 3, .shard = 1, .tp = 1, .world = 6};
  about.partition = {{"", 0}, {"h.1", 1}};
  OptimizerAbout optimizer{.class_name = "AdamW", .groups = {}};
  optimizer.groups.push_back({.options = {{{"lr", 0.1}, {"amsgrad", false}}}, .parameters = {"h.1.weight", "0:1"}});
  about.optimizers.push_back(optimizer);
  about.seeded_steps = 7;
  about.loss_scale = {1024, 2, 30, -1};
  about.extra_state = value::Dict{{{"h.2", "b"}, {"h.1", at::ones({2})}}};
  about.user_content = value::Tuple{{"a", at::ones({3})}};
  std::vector<at::Tensor> tensors;
  const auto json = write_about(about, tensors, /*allow_objects=*/false);
  const auto found =
      read_about(Json::parse(json.dump()), [&](std::size_t number) { return tensors.at(number); }, AboutWanted());
  std::vector<at::Tensor> again;
  EXPECT_EQ(write_about(found, again, false), json);
  EXPECT_EQ(found.version, kVersion);
  EXPECT_EQ(found.layout, about.layout);
  EXPECT_EQ(found.partition, about.partition);
  EXPECT_EQ(found.optimizers.at(0).groups.at(0).parameters, optimizer.groups.at(0).parameters);
  EXPECT_FALSE(at(found.optimizers.at(0).groups.at(0).options, "amsgrad").as<bool>());
  EXPECT_EQ(found.loss_scale->steps, 30);
  EXPECT_TRUE(at::equal(found.user_content.as<value::Tuple>().items.at(1).as<at::Tensor>(), at::ones({3})));
}

TEST(About, OfAManifestWithoutAVersionHasTheGeneratorsOfAllRanks) {
  const auto about = read(R"({"lamina": "0.1.0", "generators": [{"python": 1}, {}],
    "layout": {"pp": 1, "tp": 1, "rdp": 2, "sharded_data_parallel_degree": 1, "world": 2}})");
  EXPECT_EQ(about.version, 1);
  ASSERT_EQ(about.generators.size(), 2);
  EXPECT_EQ(at(about.generators.at(0).as<value::Dict>(), "python").as<std::int64_t>(), 1);
  EXPECT_EQ(about.layout->rdp, 2);
}

TEST(About, OfAModelOfOthersSaysNothing) {
  const auto about = read("{}");
  EXPECT_FALSE(about.layout || about.seeded_steps || about.loss_scale);
  EXPECT_TRUE(about.optimizers.empty() && about.partition.empty());
}

TEST(About, OfALaterVersionIsRefusedWithTheProgramThatSavedIt) {
  const auto error = message_of<base::UsageError>([] { read(R"({"version": 99, "lamina": "9.9", "layout": 3})"); });
  EXPECT_THAT(error, HasSubstr("lamina 9.9"));
  EXPECT_THAT(error, HasSubstr("[checkpoint-newer]"));
}

TEST(About, ThatIsDamagedIsAFormatError) {
  EXPECT_THROW(read(R"({"layout": {"pp": "two"}})"), base::FormatError);
  EXPECT_THROW(read(R"({"optimizers": [{"groups": 3}]})"), base::FormatError);
  EXPECT_NO_THROW(read(R"({"optimizers": [{"groups": 3}]})", {.optimizers = false}));
}

}  // namespace
}  // namespace lamina::job_checkpoint
