// SPDX-License-Identifier: Apache-2.0
#include "lamina/messaging/outcome.h"

#include <nlohmann/json.hpp>

#include "lamina/base/error.h"
#include "lamina/base/json_text.h"
#include "lamina/base/str.h"

namespace lamina::messaging {
namespace {

using base::Json;

Json described(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const base::FileError& e) {
    return {{"class", "file"}, {"text", e.what()}, {"errno", e.error_number()}};
  } catch (const base::PeerError& e) {
    Json json{{"class", "peer"}, {"text", e.what()}};
    if (e.loss()) json["loss"] = {e.loss()->rank.value, e.loss()->cause, e.loss()->details};
    return json;
  } catch (const base::UsageError& e) {
    return {{"class", "usage"}, {"text", e.what()}};
  } catch (const base::TimeoutError& e) {
    return {{"class", "timeout"}, {"text", e.what()}};
  } catch (const base::FormatError& e) {
    return {{"class", "format"}, {"text", e.what()}};
  } catch (const base::CancelledError& e) {
    return {{"class", "cancelled"}, {"text", e.what()}};
  } catch (const std::exception& e) {
    return {{"class", ""}, {"text", e.what()}};
  } catch (...) {
    return {{"class", ""}, {"text", "an unknown error"}};
  }
}

}  // namespace

std::string to_text(const std::exception_ptr& error, base::Rank rank) {
  constexpr auto kMetOn = "on rank ";
  auto json = described(error);
  const auto text = json["text"].get<std::string>();
  if (!text.starts_with(kMetOn)) json["text"] = base::str(kMetOn, rank, ": ", text);
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::exception_ptr to_error(const std::string& given) {
  const auto json = Json::parse(given);
  const auto text = json.at("text").get<std::string>(), kind = json.at("class").get<std::string>();
  if (kind == "file") return std::make_exception_ptr(base::FileError(text, json.at("errno").get<int>()));
  if (kind == "peer") {
    std::optional<base::Loss> loss;
    if (json.contains("loss"))
      loss = {base::Rank(json["loss"][0].get<std::int64_t>()), json["loss"][1], json["loss"][2]};
    return std::make_exception_ptr(base::PeerError(text, loss));
  }
  if (kind == "usage") return std::make_exception_ptr(base::UsageError(text));
  if (kind == "timeout") return std::make_exception_ptr(base::TimeoutError(text));
  if (kind == "format") return std::make_exception_ptr(base::FormatError(text));
  if (kind == "cancelled") return std::make_exception_ptr(base::CancelledError(text));
  return std::make_exception_ptr(base::Error(text));
}

}  // namespace lamina::messaging
