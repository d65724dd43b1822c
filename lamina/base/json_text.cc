// SPDX-License-Identifier: Apache-2.0
#include "lamina/base/json_text.h"

#include <string>

namespace lamina::base {
namespace {

class TooDeep : public Json::exception {
 public:
  TooDeep() : exception(599, ("lists in more than " + std::to_string(kMostDepth) + " lists").c_str()) {}
};

bool is_too_deep(std::string_view text) {
  int depth = 0;
  bool in_string = false;
  for (std::size_t at = 0; at < text.size(); ++at) {
    const char each = text[at];
    if (in_string) {
      if (each == '\\') ++at;
      in_string = each != '"';
    } else if (each == '"') {
      in_string = true;
    } else if (each == '[' || each == '{') {
      if (++depth > kMostDepth) return true;
    } else if (each == ']' || each == '}') {
      --depth;
    }
  }
  return false;
}

// Follows a text, and stops where it is too deep.
class Depth : public Json::json_sax_t {
 public:
  bool too_deep = false;

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(std::int64_t) override { return true; }
  bool number_unsigned(std::uint64_t) override { return true; }
  bool number_float(double, const std::string&) override { return true; }
  bool string(std::string&) override { return true; }
  bool binary(Json::binary_t&) override { return true; }
  bool key(std::string&) override { return true; }
  bool start_object(std::size_t) override { return deeper(); }
  bool start_array(std::size_t) override { return deeper(); }
  bool end_object() override { return --depth_ >= 0; }
  bool end_array() override { return --depth_ >= 0; }
  bool parse_error(std::size_t, const std::string&, const Json::exception&) override { return false; }

 private:
  bool deeper() {
    too_deep = ++depth_ > kMostDepth;
    return !too_deep;
  }

  int depth_ = 0;
};

}  // namespace

Json parse_json(std::string_view text) {
  if (is_too_deep(text)) throw TooDeep();
  return Json::parse(text);
}

Json parse_msgpack(std::string_view bytes) {
  Depth depth;
  Json::sax_parse(bytes, &depth, Json::input_format_t::msgpack);
  if (depth.too_deep) throw TooDeep();
  return Json::from_msgpack(bytes);
}

}  // namespace lamina::base
