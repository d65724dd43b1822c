// SPDX-License-Identifier: Apache-2.0
#include "apps/lamina/checkpoint_command.h"

#include <unistd.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <chrono>
#include <filesystem>

#include "apps/lamina/progress_bar.h"
#include "apps/lamina/say.h"
#include "lamina/archive/diff.h"
#include "lamina/archive/merge.h"
#include "lamina/archive/reshard.h"
#include "lamina/archive/verify.h"
#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/foreign/convert.h"
#include "lamina/launch/options/command_line.h"

namespace lamina::command {
namespace {

using nlohmann::json;
using Arguments = std::vector<std::string>;

constexpr auto kPathHelp = "the folder of a checkpoint, or of several, whose newest one is taken without a tag";

void tell(const std::string& text) { complain("lamina checkpoint: ", text); }

archive::Found found(const std::string& path, const std::string& tag = "") {
  return archive::find_checkpoint(archive::file_system(), folder_meant(path), tag, tell);
}

std::string new_id() { return base::str(std::chrono::system_clock::now().time_since_epoch().count(), "-", ::getpid()); }

int verify(const Arguments& arguments) {
  CLI::App app("Reads all of a checkpoint and says what is not as it was written: exit code 1.",
               "lamina checkpoint verify");
  std::string path, tag;
  bool as_json = false;
  app.add_option("PATH", path, kPathHelp)->required()->type_name("");
  app.add_option("TAG", tag, "one of several")->type_name("");
  app.add_flag("--json", as_json, "print what was found as one line of JSON");
  if (auto code = launch::parse(app, "lamina checkpoint verify", arguments)) return *code;
  const auto checkpoint = found(path, tag);
  std::uint64_t bytes = 0;
  const auto begin = std::chrono::steady_clock::now();
  std::vector<archive::Damage> damage;
  {
    ProgressBar bar("verifying");
    damage = archive::verify(archive::file_system(), checkpoint.folder,
                             [&](auto read, auto all) { bar(bytes = read, all); });
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (as_json) {
    auto list = json::array();
    for (const auto& each : damage)
      list.push_back({{"file", each.file}, {"what", each.what}, {"tensors", each.tensors}});
    const json all{{"checkpoint", checkpoint.folder.string()}, {"bytes", bytes}, {"time_s", seconds}, {"damage", list}};
    say_json(all);
    return damage.empty() ? 0 : 1;
  }
  for (const auto& each : damage) {
    std::string lies;
    for (const auto& tensor : each.tensors) lies += base::str(lies.empty() ? "; in it lies " : ", ", tensor);
    say((checkpoint.folder / each.file).string(), ": ", each.what, lies);
  }
  if (damage.empty()) {
    constexpr double kGiga = 1e9;
    say(checkpoint.folder.string(), ": ", checkpoint.manifest.tensors.size(), " tensors in ",
        checkpoint.manifest.files.size(), " files, ", bytes, " bytes, all as they were written (",
        static_cast<double>(bytes) / kGiga / std::max(seconds, 1e-9), " GB/s)");
  }
  return damage.empty() ? 0 : 1;
}

int diff(const Arguments& arguments) {
  CLI::App app("Says in which tensors, and in what else, two checkpoints differ: exit code 1.",
               "lamina checkpoint diff");
  std::string one, other;
  bool as_json = false;
  app.add_option("A", one, kPathHelp)->required()->type_name("");
  app.add_option("B", other, "the other one")->required()->type_name("");
  app.add_flag("--json", as_json, "print the differences as one line of JSON");
  if (auto code = launch::parse(app, "lamina checkpoint diff", arguments)) return *code;
  const auto first = found(one), second = found(other);
  std::vector<archive::Difference> differences;
  {
    ProgressBar bar("comparing");
    differences = archive::diff(archive::file_system(), first, second, [&](auto read, auto all) { bar(read, all); });
  }
  auto list = json::array();
  for (const auto& each : differences) {
    json row{{"what", each.what}, {"how", each.how}};
    if (each.elements > 0) row["elements"] = each.elements;
    if (each.largest) row["largest"] = *each.largest;  // of a NaN, null
    list.push_back(row);
    if (as_json) continue;
    say(each.what, ": ", each.how, each.largest ? base::str(", by ", *each.largest, " at most") : "");
  }
  if (as_json) say_json(list);
  return differences.empty() ? 0 : 1;
}

int merge(const Arguments& arguments) {
  CLI::App app("Writes the model of a checkpoint as a folder that Hugging Face's from_pretrained loads.",
               "lamina checkpoint merge");
  std::string path, out, dtype;
  const std::map<std::string, layout::DType> dtypes{{"bfloat16", layout::DType::kBFloat16},
                                                    {"float16", layout::DType::kFloat16},
                                                    {"float32", layout::DType::kFloat32}};
  app.add_option("PATH", path, kPathHelp)->required()->type_name("");
  app.add_option("OUT", out, "the folder to make")->required()->type_name("");
  std::string tag;
  app.add_option("--tag", tag, "one of several")->type_name("TAG");
  app.add_option("--dtype", dtype, "of all floating elements: bfloat16, float16 or float32; else as they are")
      ->check(CLI::IsMember(dtypes))
      ->type_name("DTYPE");
  if (auto code = launch::parse(app, "lamina checkpoint merge", arguments)) return *code;
  const auto checkpoint = found(path, tag);
  archive::Merged merged;
  {
    ProgressBar bar("merging");
    archive::MergeOptions options;
    if (!dtype.empty()) options.dtype = dtypes.at(dtype);
    merged = archive::merge(archive::file_system(), checkpoint, out, options,
                            [&](auto so_far, auto all) { bar(so_far, all); });
  }
  say(out, ": ", merged.tensors, " tensors in ", merged.files, " files, ", merged.bytes, " bytes");
  if (merged.too_large > 0) say(merged.too_large, " elements are too large for ", dtype, " and infinite there");
  return 0;
}

int reshard(const Arguments& arguments) {
  CLI::App app(
      "Writes a checkpoint anew, with its tensors cut into so many shards. One loads into any layout without that.",
      "lamina checkpoint reshard");
  std::string path, out, tag;
  std::size_t writers = 0;
  app.add_option("PATH", path, kPathHelp)->required()->type_name("");
  app.add_option("OUT", out, "the folder of checkpoints to save it in, under its tag")->required()->type_name("");
  app.add_option("--tag", tag, "one of several")->type_name("TAG");
  app.add_option("--files", writers, "shards of each tensor, each shard in files of its own")
      ->required()
      ->type_name("N");
  if (auto code = launch::parse(app, "lamina checkpoint reshard", arguments)) return *code;
  const auto checkpoint = found(path, tag);
  ProgressBar bar("writing");
  const auto made = archive::reshard(archive::file_system(), checkpoint, out, writers, new_id(),
                                     [&](auto so_far, auto all) { bar(so_far, all); });
  say(made.folder.string(), ": ", made.manifest.tensors.size(), " tensors in ", made.manifest.files.size(), " files");
  return 0;
}

// Reads what a path means: a file of torch.save, a folder that torch.distributed.checkpoint or
// smdistributed.modelparallel wrote, or the folder of several of the latter's, whose newest one is taken.
foreign::ForeignCheckpoint read_foreign(archive::FileSystem& files, const std::filesystem::path& path,
                                        std::optional<archive::Share> verify) {
  if (!std::filesystem::is_directory(path)) return foreign::read_torch_file(files, path, {.verify = verify});
  if (std::filesystem::exists(path / ".metadata")) return foreign::read_distributed_checkpoint(files, path, verify);
  if (const auto found = foreign::find_smp_checkpoint(files, path, {})) {
    return foreign::read_smp_checkpoint(files, *found, verify);
  }
  throw base::UsageError(base::str(path.string(),
                                   " has neither .metadata (of torch.distributed.checkpoint) nor model_*.pt (of "
                                   "smdistributed.modelparallel): give the folder that has, or a file of torch.save"));
}

int convert(const Arguments& arguments) {
  CLI::App app(
      "Saves what torch.distributed.checkpoint, torch.save or smdistributed.modelparallel wrote as a checkpoint.",
      "lamina checkpoint convert");
  std::string path, out, tag = "converted", prefix;
  app.add_option("PATH", path, "the folder that has .metadata or model_*.pt, or the file")->required()->type_name("");
  app.add_option("OUT", out, "the folder of checkpoints to save it in")->required()->type_name("");
  app.add_option("--tag", tag, "of the checkpoint")->type_name("TAG")->capture_default_str();
  app.add_option("--prefix", prefix, "take the tensors whose names begin so, and take it off: \"model.\"")
      ->type_name("TEXT");
  bool unverified = false;
  app.add_flag("--no-verify", unverified, "do not read all first, to compare it with the checksums in the files");
  if (auto code = launch::parse(app, "lamina checkpoint convert", arguments)) return *code;
  auto& files = archive::file_system();
  const auto from = read_foreign(files, path, unverified ? std::nullopt : std::optional(archive::Share{}));
  ProgressBar bar("writing");
  const auto made =
      foreign::convert(files, from, prefix, out, tag, new_id(), [&](auto so_far, auto all) { bar(so_far, all); });
  say(made.folder.string(), ": ", made.manifest.tensors.size(), " tensors in ", made.manifest.files.size(), " files");
  const auto is_state = [](const auto& tensor) { return tensor.kind == archive::Kind::kState; };
  if (const auto left =
          std::ranges::count_if(from.tensors, is_state) - std::ranges::count_if(made.manifest.tensors, is_state);
      left > 0) {
    say("left: ", left, " states of optimizers, whose parameters have other names: give --prefix");
  }
  if (!from.left.empty()) {
    constexpr std::size_t kShown = 10;
    std::string names;
    for (std::size_t i = 0; i < std::min(from.left.size(), kShown); ++i) names += " " + from.left[i].name;
    const auto more = from.left.size() > kShown ? base::str(" and ", from.left.size() - kShown, " more") : "";
    say("left:", names, more);
  }
  return 0;
}

int prune(const Arguments& arguments) {
  CLI::App app("Removes all checkpoints of a folder but the latest; damaged ones are left.", "lamina checkpoint prune");
  std::string folder;
  std::size_t keep = 0;
  app.add_option("FOLDER", folder, "of checkpoints")->required()->type_name("")->check(CLI::ExistingDirectory);
  app.add_option("--keep", keep, "how many stay, at least 1")->required()->type_name("N")->check(CLI::PositiveNumber);
  if (auto code = launch::parse(app, "lamina checkpoint prune", arguments)) return *code;
  archive::Store store(archive::file_system(), folder);
  const auto removed = store.prune(keep);
  for (const auto& tag : removed) say("removed ", tag);
  if (removed.empty()) say("nothing to remove");
  return 0;
}

struct Command {
  const char* name;
  const char* description;
  int (*run)(const Arguments& arguments);
};

constexpr Command kCommands[] = {
    {"inspect", "Prints what a checkpoint holds, or which ones a folder has", inspect_checkpoint},
    {"verify", "Reads all of a checkpoint and says what is not as it was written", verify},
    {"diff", "Says in what two checkpoints differ", diff},
    {"merge", "Writes the model of a checkpoint as a Hugging Face folder", merge},
    {"reshard", "Writes a checkpoint with its tensors cut into so many shards", reshard},
    {"convert", "Saves what torch.distributed.checkpoint, torch.save or the original wrote as a checkpoint", convert},
    {"prune", "Removes all checkpoints of a folder but the latest", prune},
};

}  // namespace

std::string folder_meant(const std::string& path) {
  const std::filesystem::path place(path);
  if (!std::filesystem::is_regular_file(place)) return path;
  if (place.filename() == "newest") return place.has_parent_path() ? place.parent_path().string() : ".";
  throw base::UsageError(base::str(path, " is a file: give the folder that it is in"));
}

int checkpoint(const Arguments& arguments) {
  CLI::App app("Looks at the files of checkpoints and changes them, without torch and without ranks.",
               "lamina checkpoint");
  for (const auto& command : kCommands) app.add_subcommand(command.name, command.description);
  const auto line = launch::split(app, arguments);
  if (auto code = launch::parse(app, "lamina checkpoint", line.options)) return *code;
  const std::string name = line.rest.empty() ? "" : line.rest.front();
  for (const auto& command : kCommands) {
    if (name != command.name) continue;
    try {
      return command.run({line.rest.begin() + 1, line.rest.end()});
    } catch (const base::Error& error) {
      complain("lamina checkpoint ", name, ": ", error.what());
      return 2;
    } catch (const std::filesystem::filesystem_error& error) {  // a path that cannot be looked at
      complain("lamina checkpoint ", name, ": ", error.what());
      return 2;
    }
  }
  tell(name.empty() ? "say what to do; see `lamina checkpoint --help`"
                    : base::str("no command ", name, "; see `lamina checkpoint --help`"));
  return 2;
}

}  // namespace lamina::command
