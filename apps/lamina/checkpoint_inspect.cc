// SPDX-License-Identifier: Apache-2.0
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <iomanip>
#include <set>
#include <sstream>

#include "apps/lamina/checkpoint_command.h"
#include "apps/lamina/say.h"
#include "lamina/archive/piece_reader.h"
#include "lamina/archive/store.h"
#include "lamina/base/error.h"
#include "lamina/base/joined.h"
#include "lamina/base/str.h"
#include "lamina/launch/options/command_line.h"

namespace lamina::command {
namespace {

using nlohmann::json;

constexpr const char* kKinds[] = {"parameter", "buffer", "master", "state", "content"};

std::string text(const layout::Shape& shape) { return base::str("(", base::joined(shape), ")"); }

std::string files_of(const archive::Manifest& manifest, const archive::SavedTensor& tensor) {
  std::set<std::size_t> files;
  for (const auto& piece : tensor.pieces) files.insert(piece.file);
  if (files.empty()) return "";
  const auto& first = manifest.files[*files.begin()].name;
  return files.size() == 1 ? first : base::str(first, " and ", files.size() - 1, " more");
}

// Rows with columns as wide as their widest cell; numbers are not told apart.
void print_table(std::vector<std::vector<std::string>> rows) {
  for (auto& row : rows) std::ranges::transform(row, row.begin(), base::printable_line);
  std::vector<std::size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  for (const auto& row : rows) {
    std::ostringstream line;
    for (std::size_t i = 0; i + 1 < row.size(); ++i) {
      line << std::left << std::setw(static_cast<int>(widths[i] + 2)) << row[i];
    }
    say(line.str(), row.back());
  }
}

json to_json(const archive::Found& found) {
  auto files = json::array(), tensors = json::array();
  for (const auto& file : found.manifest.files) files.push_back({{"name", file.name}, {"bytes", file.bytes}});
  for (const auto& tensor : found.manifest.tensors) {
    json row{{"name", tensor.name},
             {"kind", kKinds[static_cast<std::size_t>(tensor.kind)]},
             {"dtype", traits(tensor.dtype).name},
             {"shape", tensor.shape},
             {"bytes", archive::bytes_of(tensor)},
             {"pieces", tensor.pieces.size()}};
    if (!tensor.state.empty()) row["state"] = tensor.state;
    if (!tensor.also.empty()) row["also"] = tensor.also;
    tensors.push_back(std::move(row));
  }
  return {{"tag", found.tag},
          {"folder", found.folder.string()},
          {"id", found.manifest.id},
          {"number", found.manifest.number},
          {"files", files},
          {"tensors", tensors},
          {"about", found.manifest.about}};
}

void print(const archive::Found& found) {
  const auto& manifest = found.manifest;
  std::uint64_t bytes = 0;
  for (const auto& file : manifest.files) bytes += file.bytes;
  say(found.folder.string(), ": ", manifest.tensors.size(), " tensors in ", manifest.files.size(), " files, ", bytes,
      " bytes");
  for (const auto& [key, value] : manifest.about.items()) {
    constexpr const char* kLong[] = {"generators", "partition", "translations", "user_content"};  // --json has them
    if (std::ranges::find(kLong, key) != std::end(kLong)) continue;
    if (key != "optimizers" || !value.is_array()) {
      say(key, ": ", value.dump());
      continue;
    }
    for (const auto& optimizer : value) {  // without the names of its parameters, which are in the table
      auto shown = optimizer;
      if (shown.contains("groups") && shown["groups"].is_array()) {
        for (auto& group : shown["groups"]) {
          if (group.is_object() && group.contains("params") && group["params"].is_array())
            group["params"] = group["params"].size();
        }
      }
      say("optimizer: ", shown.dump());
    }
  }
  std::vector<std::vector<std::string>> rows{{"tensor", "kind", "dtype", "shape", "bytes", "pieces", "in"}};
  for (const auto& tensor : manifest.tensors) {
    rows.push_back({describe(tensor), kKinds[static_cast<std::size_t>(tensor.kind)],
                    std::string(traits(tensor.dtype).name), text(tensor.shape),
                    std::to_string(archive::bytes_of(tensor)), std::to_string(tensor.pieces.size()),
                    files_of(manifest, tensor)});
    for (const auto& name : tensor.also)
      rows.push_back({name, "", "", "", "", "", base::str("the same as ", tensor.name)});
  }
  say("");
  print_table(rows);
}

// The checkpoints of a folder, the newest one marked.
void print_all(archive::Store& store, bool as_json) {
  std::string newest;
  try {
    if (const auto found = store.newest([](const auto&) {})) newest = found->tag;
  } catch (const base::FormatError&) {
    newest.clear();  // none is whole, as the list says
  }
  auto list = json::array();
  std::vector<std::vector<std::string>> rows{{"", "tag", "number", ""}};
  for (const auto& each : store.list()) {
    rows.push_back(
        {each.tag == newest ? "*" : "", each.tag, each.damage.empty() ? std::to_string(each.number) : "-",
         each.damage.empty() ? (each.tag == newest ? "the newest" : "") : base::str("damaged: ", each.damage)});
    json row{{"tag", each.tag}, {"newest", each.tag == newest}};
    if (each.damage.empty()) row["number"] = each.number;
    if (!each.damage.empty()) row["damage"] = each.damage;
    list.push_back(row);
  }
  if (as_json) {
    say_json(list);
  } else {
    print_table(rows);
  }
}

bool has_manifest(const std::string& path) {
  const auto entries = archive::file_system().list(path);
  return std::ranges::any_of(entries, [](const auto& each) { return each.name == archive::kManifestName; });
}

}  // namespace

int inspect_checkpoint(const std::vector<std::string>& arguments) {
  CLI::App app("Prints the tensors, files and options of a checkpoint; of a folder of several, which ones there are.",
               "lamina checkpoint inspect");
  std::string path, tag;
  bool as_json = false;
  app.add_option("PATH", path, "the folder of a checkpoint, or of several")->required()->type_name("");
  app.add_option("TAG", tag, "one of several")->type_name("");
  app.add_flag("--json", as_json, "print it as one line of JSON");
  if (auto code = launch::parse(app, "lamina checkpoint inspect", arguments)) return *code;
  path = folder_meant(path);
  archive::Store store(archive::file_system(), path);
  if (tag.empty() && !has_manifest(path) && !store.list().empty()) {
    print_all(store, as_json);
    return 0;
  }
  const auto found = archive::find_checkpoint(archive::file_system(), path, tag, [](const auto&) {});
  if (as_json) {
    say_json(to_json(found));
  } else {
    print(found);
  }
  return 0;
}

}  // namespace lamina::command
