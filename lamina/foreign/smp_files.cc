// SPDX-License-Identifier: Apache-2.0
#include "lamina/foreign/smp_files.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <optional>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/foreign/torch_file.h"

namespace lamina::foreign {

using archive::FileSystem;
using archive::Path;

namespace {

constexpr std::string_view kFileSuffix = ".pt";
constexpr std::int64_t kMostNumber = std::int64_t{1} << 40;

std::optional<SmpFile> to_file(const std::string& name, std::string_view prefix) {
  if (!name.starts_with(prefix) || !name.ends_with(kFileSuffix)) return std::nullopt;
  SmpFile file{.name = name};
  const auto* at = name.data() + prefix.size();
  const auto* const end = name.data() + name.size() - kFileSuffix.size();
  while (at <= end) {
    std::int64_t number = 0;
    const auto [next, error] = std::from_chars(at, end, number);
    if (error != std::errc() || number < 0 || number > kMostNumber || (next != end && *next != '_'))
      return std::nullopt;
    file.numbers.push_back(number);
    at = next + 1;
  }
  return file;
}

std::vector<SmpFile> models_in(const std::vector<FileSystem::Entry>& entries) {
  std::vector<std::string> names;
  for (const auto& entry : entries) names.push_back(entry.name);
  return files_with(names, kModels);
}

}  // namespace

std::vector<SmpFile> files_with(const std::vector<std::string>& names, std::string_view prefix) {
  std::vector<SmpFile> found;
  for (const auto& name : names) {
    if (auto file = to_file(name, prefix)) found.push_back(*std::move(file));
  }
  std::ranges::sort(found);
  return found;
}

void require_each(const Path& folder, std::string_view prefix, const std::vector<SmpFile>& files) {
  std::vector<std::int64_t> sizes;
  for (const auto& file : files) {
    sizes.resize(std::max(sizes.size(), file.numbers.size()));
    for (std::size_t i = 0; i < file.numbers.size(); ++i) sizes[i] = std::max(sizes[i], file.numbers[i] + 1);
  }
  std::vector<std::int64_t> numbers(sizes.size());
  bool more = !files.empty();
  for (auto file = files.begin(); more; ++file) {
    if (file == files.end() || file->numbers != numbers) {
      std::string name(prefix);
      for (std::size_t i = 0; i < numbers.size(); ++i) name += base::str(i == 0 ? "" : "_", numbers[i]);
      throw base::FormatError(base::str((folder / name).string(), kFileSuffix, ": the checkpoint has no such file"));
    }
    more = false;
    for (auto i = numbers.size(); i-- > 0 && !more;) {
      more = ++numbers[i] < sizes[i];
      if (!more) numbers[i] = 0;
    }
  }
}

void require_alike(const Path& folder, const std::vector<SmpFile>& models, const std::vector<SmpFile>& optimizers,
                   const std::vector<SmpFile>& precisions) {
  if (models.empty()) throw base::FormatError(base::str(folder.string(), ": it has no model_*.pt"));
  const auto partitions = [](const auto& files) { return files.back().numbers.front() + 1; };
  if (!optimizers.empty() && partitions(models) != partitions(optimizers)) {
    throw base::FormatError(base::str(folder.string(), ": it has the models of ", partitions(models),
                                      " partitions and the optimizers of ", partitions(optimizers),
                                      ": the file of a rank is missing"));
  }
  if (!precisions.empty() && precisions.size() != optimizers.size()) {
    throw base::FormatError(base::str(folder.string(), ": it has ", optimizers.size(), " files optimizer_*.pt and ",
                                      precisions.size(), " fp16_states_*.pt: the file of a rank is missing"));
  }
}

bool is_smp_checkpoint(FileSystem& files, const Path& folder) { return !models_in(files.list(folder)).empty(); }

// A folder of checkpoints may have files of the user's with such names: it is no checkpoint itself.
std::optional<Path> find_smp_checkpoint(FileSystem& files, const Path& folder, const std::optional<std::string>& tag) {
  constexpr std::uint64_t kMostNameBytes = 4096;
  constexpr auto kNewest = "newest", kSuffix = "_partial";
  const auto listed = [&](const Path& place) {
    try {
      return files.list(place);
    } catch (const base::FileError&) {
      return std::vector<FileSystem::Entry>();  // it is no folder
    }
  };
  const auto has = [&](const auto& is_meant) { return std::ranges::any_of(listed(folder), is_meant); };
  const auto newest = [&]() -> std::string {
    try {
      auto name = read_all(files, folder / kNewest, kMostNameBytes);
      while (!name.empty() && std::isspace(static_cast<unsigned char>(name.back())) != 0) name.pop_back();
      return Path(name).filename().string();
    } catch (const base::Error&) {
      return "";  // it names none
    }
  };
  const auto found = [&](const Path& place) {
    return models_in(listed(place)).empty() ? std::nullopt : std::optional(place);
  };
  if (tag) {
    const auto name = *tag + kSuffix;
    return found(folder / (has([&](const auto& entry) { return entry.name == name; }) ? name : *tag));
  }
  const auto named = newest();
  auto place = named.empty() ? std::nullopt : found(folder / named);
  const auto is_checkpoint = [](const auto& entry) { return entry.folder && entry.name.ends_with(kSuffix); };
  return place || has(is_checkpoint) ? place : found(folder);
}

}  // namespace lamina::foreign
