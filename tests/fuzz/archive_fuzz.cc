// SPDX-License-Identifier: Apache-2.0
// Files of checkpoints as a fuzzer makes them: manifests, headers of safetensors files, pickles, zip archives, files of
// torch.save, metadata of torch.distributed.checkpoint and files of smdistributed. With clang it is a libFuzzer target,
// else a program that damages samples at random for a while: `archive_fuzz SECONDS [SEED]`. Anything but a value or a
// FormatError ends it; of what is converted, also one that says that no checkpoint can be made of it.
#include <algorithm>
#include <chrono>
#include <iostream>
#include <random>

#include "lamina/archive/checksums.h"
#include "lamina/archive/manifest.h"
#include "lamina/archive/safetensors.h"
#include "lamina/base/error.h"
#include "lamina/foreign/convert.h"
#include "lamina/foreign/pickle.h"
#include "lamina/foreign/zip_file.h"
#include "tests/archive/simulated_files.h"
#include "tests/foreign/files.h"

namespace {

using namespace lamina;
using namespace lamina::archive;
using namespace lamina::archive::testing;
using namespace lamina::foreign;
using namespace lamina::foreign::testing;

class TextInput : public FileSystem::Input {
 public:
  explicit TextInput(std::string_view text) : text_(text) {}
  std::uint64_t size() const override { return text_.size(); }
  void read(std::uint64_t offset, std::span<std::byte> to) const override {
    if (offset > size() || to.size() > size() - offset) throw base::FormatError("ends too early");
    std::ranges::copy(std::as_bytes(std::span(text_.substr(offset, to.size()))), to.begin());
  }

 private:
  const std::string_view text_;
};

// A manifest is read with the right checksum, since others are refused before more of them is read.
void read_as_manifest(std::string_view rest) {
  const auto sum = to_hex({{checksum(std::as_bytes(std::span(rest)))}});
  const auto manifest = read_manifest("{\"checksum\": \"" + sum + "\",\n" + std::string(rest) + "\n");
  for (const auto& tensor : manifest.tensors) {
    if (tensor.shape.size() < 4 && layout::numel(tensor.shape) < 10'000) pieces_problem(tensor);
  }
}

void read_as_header(std::string_view json) {
  const std::uint64_t size = json.size();
  const std::string text = std::string(reinterpret_cast<const char*>(&size), sizeof(size)) + std::string(json);
  read_header(TextInput(text), "f");
  read_header(TextInput(json), "f");
}

// As a pickle, and as the zip archive of torch.save that has it.
void read_as_pickle(std::string_view bytes) {
  Pickle(bytes, [](std::string_view global) { return !global.starts_with("os."); });
}
void read_as_zip(std::string_view bytes) { read_zip(TextInput(bytes), {0, bytes.size()}); }

void convert_all(FileSystem& files, const ForeignCheckpoint& found) {
  try {
    convert(files, found, "", "/out", "a", "1", [](auto, auto) {});
  } catch (const base::UsageError&) {   // no tensors
  } catch (const base::ConfigError&) {  // more elements than a number holds
  }
}

// As the whole file, and as the pickle in one.
void read_as_torch_file(std::string_view bytes) {
  for (const auto& file : {std::string(bytes), torch_file(std::string(bytes))}) {
    SimulatedFiles files;
    write_file(files, "/f", file);
    try {
      convert_all(files, read_torch_file(files, "/f"));
    } catch (const base::FormatError&) {
    }
  }
}

// As the metadata of a folder, and as the file in one.
void read_as_distributed(std::string_view bytes) {
  static const auto whole = torch_file(pickle(tensor()));
  for (const auto& [metadata, file] :
       {std::pair(std::string(bytes), whole),
        std::pair(lamina::foreign::testing::metadata(bytes.size()), std::string(bytes))}) {
    SimulatedFiles files;
    write_distributed(files, "/d", metadata, file);
    try {
      convert_all(files, read_distributed_checkpoint(files, "/d"));
    } catch (const base::FormatError&) {
    } catch (const base::FileError&) {  // it names a file that is not there
    }
  }
}

// As each file of a folder of smdistributed, the others whole.
void read_as_smp(std::string_view bytes) {
  for (const auto* damaged : {"model_0.pt", "optimizer_0_0_0.pt", "fp16_states_0.pt", "user_content.pt"}) {
    SimulatedFiles files;
    write_smp(files, "/s", {{damaged, std::string(bytes)}});
    try {
      convert_all(files, read_smp_checkpoint(files, "/s"));
    } catch (const base::FormatError&) {
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  for (const auto read : {read_as_manifest, read_as_header, read_as_pickle, read_as_zip, read_as_torch_file,
                          read_as_distributed, read_as_smp}) {
    try {
      read(text);
    } catch (const base::FormatError&) {
    }
  }
  return 0;
}

#ifndef LAMINA_LIBFUZZER
namespace {

std::string sample_manifest() {
  Manifest manifest{.id = "1", .number = 1, .files = {{"a.safetensors", 2000, {1}}, {"b.safetensors", 2000, {2}}}};
  auto first = layout::whole({4, 12}), second = first;
  first.stripes = {{0, 0, 2}, {2, 3, 1}};
  first.extent = 4;
  first.end = first.size = 48;
  second.begin = 24;
  second.size = 24;
  manifest.tensors.push_back({.name = "h.weight", .shape = {4, 12}, .pieces = {{0, 8, first}, {1, 8, second}}});
  manifest.tensors.push_back({.name = "h.weight",
                              .kind = Kind::kState,
                              .optimizer = 1,
                              .state = "exp_avg",
                              .shape = {},
                              .pieces = {{1, 200, layout::whole({})}},
                              .also = {"tied"}});
  manifest.about = {{"layout", {{"pp", 2}}}, {"counters", {1, 2.5, nullptr, "x"}}};
  return write_manifest(manifest).substr(34);
}

std::string sample_header() {
  std::vector<Entry> entries{{.name = "a", .shape = {2, 0}},
                             {.name = "b", .dtype = layout::DType::kBool, .shape = {0, 3}}};
  return make_header(entries, {{"format", "pt"}}).substr(8);
}

// {"w": a tensor of two elements, "n": (1.5, None, [True])}, as torch.save has it.
std::string sample_pickle() {
  constexpr char bytes[] =
      "\x80\x02}q\x00(X\x01\x00\x00\x00wq\x01"
      "ctorch._utils\n_rebuild_tensor_v2\nq\x02((X\x07\x00\x00\x00storageq\x03"
      "ctorch\nFloatStorage\nq\x04X\x01\x00\x00\x00"
      "0q\x05X\x03\x00\x00\x00"
      "cpuq\x06K\x02tq\x07QK\x00K\x02\x85q\x08"
      "K\x01\x85q\x09\x89"
      "ccollections\nOrderedDict\nq\n)Rq\x0btq\x0cRq\x0dX\x01\x00\x00\x00nG?\xf8\x00\x00\x00\x00\x00\x00N]\x88"
      "a\x87u.";
  return {bytes, sizeof(bytes) - 1};
}

// An archive of one empty file "a".
std::string sample_zip() {
  std::string local("PK\x03\x04", 4), entry("PK\x01\x02", 4), end("PK\x05\x06", 4);
  local.resize(30);
  local[26] = 1;
  local += "a";
  entry.resize(46);
  entry[28] = 1;
  entry += "a";
  end.resize(22);
  end[8] = end[10] = 1;
  end[12] = static_cast<char>(entry.size());
  end[16] = static_cast<char>(local.size());
  return local + entry + end;
}

}  // namespace

int main(int count, char** words) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(count > 1 ? std::atol(words[1]) : 10);
  std::mt19937_64 random(count > 2 ? std::atoll(words[2]) : 1);
  const auto file = torch_file(pickle(tensor()));
  const std::string wholes[] = {sample_manifest(),     sample_header(), sample_pickle(),  sample_zip(), file,
                                metadata(file.size()), smp_model(),     smp_optimizer(1), smp_content()};
  constexpr std::string_view kParts[] = {"{",      "}",
                                         "[",      "]",
                                         ",",      "\"",
                                         "0",      "-1",
                                         "1e999",  "18446744073709551616",
                                         "null",   "1152921504606846976",
                                         "[[[[",   "\\u0000",
                                         "\"a\":", "..",
                                         "/"};
  std::int64_t texts = 0;
  for (; std::chrono::steady_clock::now() < end; ++texts) {
    std::string text = wholes[random() % std::size(wholes)];
    for (auto left = 1 + random() % 4; left > 0 && !text.empty(); --left) {
      const auto at = random() % text.size();
      const auto length = std::min<std::size_t>(1 + random() % 8, text.size() - at);
      switch (random() % 5) {
        case 0:
          text.replace(at, length, kParts[random() % std::size(kParts)]);
          break;
        case 1:
          text[at] = static_cast<char>(random());
          break;
        case 2:
          text.insert(at, text, random() % text.size(), random() % 64);
          break;
        case 3:
          text.insert(at, kParts[random() % std::size(kParts)]);
          break;
        default:
          text.erase(at, length);
      }
    }
    LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(text.data()), text.size());
  }
  std::cout << texts << " texts were read or malformed" << std::endl;
}
#endif
