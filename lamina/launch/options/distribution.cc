// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/options/distribution.h"

#include <yaml-cpp/yaml.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>

#include "lamina/base/error.h"
#include "lamina/base/input_file.h"
#include "lamina/base/json_text.h"
#include "lamina/base/str.h"
#include "lamina/config/config.h"
#include "lamina/config/problems.h"

namespace lamina::launch {
namespace {

using base::Json;
using base::str;

Json scalar(const YAML::Node& node) {
  const std::string& text = node.Scalar();
  if (node.Tag() == "!") return text;  // in quotes
  if (text == "true" || text == "True" || text == "TRUE") return true;
  if (text == "false" || text == "False" || text == "FALSE") return false;
  static const std::regex number(R"([-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?)");
  if (!std::regex_match(text, number)) return text;
  const bool whole = text.find_first_of(".eE") == std::string::npos;
  try {
    return whole ? Json(std::stoll(text)) : Json(std::stod(text));
  } catch (const std::out_of_range&) {
    return text;
  }
}

// Makes a document what it stands for: an alias is a copy of its anchor, so a text of few lines may stand for any
// number of values, or be in itself.
class Converter {
 public:
  Json convert(const YAML::Node& node) {
    if (++values_ > kMostValues) fail(node, str("it stands for more than ", kMostValues, " values"));
    if (node.IsScalar()) {
      bytes_ += node.Scalar().size();
      if (bytes_ > kMostBytes) fail(node, str("it stands for more than ", kMostBytes, " bytes"));
      return scalar(node);
    }
    if (++depth_ > base::kMostDepth) fail(node, str("lists in more than ", base::kMostDepth, " lists"));
    Json result;
    if (node.IsSequence()) {
      result = Json::array();
      for (const auto& item : node) result.push_back(convert(item));
    } else if (node.IsMap()) {
      result = Json::object();
      for (const auto& entry : node) {
        if (!entry.first.IsScalar()) fail(entry.first, "a key is to be a word");
        result[entry.first.Scalar()] = convert(entry.second);
      }
    }
    --depth_;
    return result;
  }

 private:
  [[noreturn]] static void fail(const YAML::Node& node, const std::string& why) {
    throw YAML::Exception(node.Mark(), why);
  }

  static constexpr int kMostValues = 100'000;
  static constexpr std::size_t kMostBytes = std::size_t{16} << 20;
  std::size_t bytes_ = 0;  // of its words
  int values_ = 0, depth_ = 0;
};

// Returns a YAML document as JSON: plain scalars are null, booleans and numbers where YAML 1.2 reads them so. Throws
// ConfigError that begins with `source`.
Json parse_yaml(const std::string& text, const std::string& source) {
  try {
    return Converter().convert(YAML::Load(text));
  } catch (const YAML::Exception& error) {
    throw base::ConfigError(str(source, " is not valid YAML: line ", error.mark.line + 1, ", column ",
                                error.mark.column + 1, ": ", error.msg));
  }
}

class DistributionReader {
 public:
  explicit DistributionReader(const std::string& path) : path_(path) {}

  Distribution read() {
    Json root = parse();
    if (root.is_object() && root.size() == 1 && root.contains("distribution")) root = root["distribution"];
    require_object(root, "the whole");
    const bool is_distribution = root.contains("smdistributed") || root.contains("mpi");
    if (!is_distribution && !root.empty()) {
      read_keys(root);
      return result_;
    }
    for (const auto& [key, value] : root.items()) {
      if (key == "smdistributed") {
        read_smdistributed(value);
      } else if (key == "mpi") {
        read_mpi(value);
      } else {
        fail(str(key, " is not known beside smdistributed and mpi: give these, or keys of the configuration alone"));
      }
    }
    return result_;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw base::ConfigError(str("--config ", path_, ": ", what));
  }

  void require_object(const Json& value, const std::string& name) const {
    if (!value.is_object()) fail(str(name, " is to be a dictionary, not ", value.dump()));
  }

  Json parse() const {
    const std::string text = base::read_file(path_, str("--config ", path_, ": "), base::kMostOfKeys);
    if (path_.ends_with(".yaml") || path_.ends_with(".yml")) return parse_yaml(text, "--config " + path_);
    try {
      return base::parse_json(text);
    } catch (const Json::exception& error) {
      fail(str("is not valid JSON: ", config::json_reason(error), " (YAML is read from files named .yaml)"));
    }
  }

  bool enabled(const Json& part, const std::string& name) const {
    const auto at = part.find("enabled");
    if (at == part.end()) return true;
    if (!at->is_boolean()) fail(str(name, ".enabled is to be true or false, not ", at->dump()));
    return *at;
  }

  void read_smdistributed(const Json& value) {
    require_object(value, "smdistributed");
    for (const auto& [key, part] : value.items()) {
      if (key != "modelparallel") fail(str("smdistributed.", key, " is not known; expected modelparallel"));
      require_object(part, "smdistributed.modelparallel");
      if (!enabled(part, "smdistributed.modelparallel")) continue;
      read_keys(part);
      result_.parameters = part.value("parameters", Json::object()).dump();
    }
  }

  // The keys of the configuration, in one of their two shapes.
  void read_keys(const Json& keys) {
    result_.parameters = keys.dump();
    try {
      config::parse_config({.json = *result_.parameters});
    } catch (const base::ConfigError& error) {
      fail(error.what());
    }
  }

  void read_mpi(const Json& value) {
    require_object(value, "mpi");
    const bool on = enabled(value, "mpi");
    for (const auto& [key, part] : value.items()) {
      if (key == "processes_per_host") {
        const auto most = std::numeric_limits<int>::max();
        if (!part.is_number_integer() || part < 1 || part > most) {
          fail(str("mpi.", key, " is to be from 1 to ", most, ", not ", part.dump()));
        }
        if (on) result_.processes = part.get<int>();
      } else if (key == "custom_mpi_options") {
        if (!part.is_string()) fail(str("mpi.", key, " is to be a string, not ", part.dump()));
        if (on) read_options(part.get<std::string>());
      } else if (key != "enabled") {
        fail(str("mpi.", key, " is not known; expected enabled, processes_per_host, custom_mpi_options"));
      }
    }
  }

  // Only -x means something without MPI.
  void read_options(const std::string& line) {
    std::istringstream words(line);
    std::string others;
    for (std::string word; words >> word;) {
      std::string variable;
      if (word == "-x" && words >> variable) {
        result_.variables.push_back(variable);
      } else {
        others += (others.empty() ? "" : " ") + word;
      }
    }
    if (!others.empty()) {
      result_.warnings.push_back(str("mpi.custom_mpi_options: no effect without MPI: ", others));
    }
  }

  const std::string path_;
  Distribution result_;
};

}  // namespace

Distribution read_distribution(const std::string& path) { return DistributionReader(path).read(); }

}  // namespace lamina::launch
