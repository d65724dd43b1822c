// SPDX-License-Identifier: Apache-2.0
#include "lamina/data_parallel/batch_record.h"

#include <algorithm>
#include <limits>

#include "lamina/base/error.h"
#include "lamina/base/hash.h"
#include "lamina/value/bytes.h"

namespace lamina::data_parallel {
namespace {

constexpr std::size_t kLeastLosses = 3;  // that a record has room for in any case
constexpr bool BatchRecord::* kFlags[] = {&BatchRecord::is_after_step, &BatchRecord::has_data,
                                          &BatchRecord::lacks_data,    &BatchRecord::stops,
                                          &BatchRecord::lacks_memory,  &BatchRecord::names_differ};

BatchRecord merged(BatchRecord both, const BatchRecord& other) {
  if (both.is_after_step != other.is_after_step) {
    throw base::UsageError(
        "some ranks are before the step of a batch, and others after one: all of them train with the same batches, and "
        "evaluate at the same times");
  }
  both.samples += other.samples;
  both.tokens += other.tokens;
  both.ended += other.ended;
  both.seconds += other.seconds;
  both.losses.resize(std::max(both.losses.size(), other.losses.size()));
  for (std::size_t i = 0; i < other.losses.size(); ++i) both.losses[i] += other.losses[i];
  both.most_samples = std::max(both.most_samples, other.most_samples);
  for (const auto flag : kFlags) both.*flag = both.*flag || other.*flag;
  both.names_differ = both.names_differ || both.loss_names != other.loss_names;
  return both;
}

}  // namespace

void BatchRecord::give_samples(std::int64_t samples, std::int64_t tokens) {
  constexpr std::int64_t kMost = std::numeric_limits<std::uint32_t>::max();
  this->samples = samples;
  this->tokens = tokens;
  most_samples = static_cast<std::uint32_t>(std::clamp<std::int64_t>(samples, 0, kMost));
}

void BatchRecord::name_losses(std::span<const std::string> names) {
  std::string text;
  for (const auto& name : names) text.append(name).push_back('\0');
  loss_names = static_cast<std::uint32_t>(base::hash64(std::string_view(text)));
}

std::string to_bytes(const BatchRecord& record) {
  std::uint16_t flags = 0;
  for (std::size_t i = 0; i < std::size(kFlags); ++i) {
    if (record.*kFlags[i]) flags = static_cast<std::uint16_t>(flags | 1 << i);
  }
  value::Writer out;
  out.put(record.samples);
  out.put(record.tokens);
  out.put(record.seconds);
  out.put(record.ended);
  out.put(record.most_samples);
  out.put(record.loss_names);
  out.put(flags);
  out.put(static_cast<std::uint16_t>(record.losses.size()));
  for (const auto loss : record.losses) out.put(loss);
  for (auto i = record.losses.size(); i < kLeastLosses; ++i) out.put(0.0);
  return out.take();
}

BatchRecord to_record(std::string_view bytes) {
  value::Reader in(bytes);
  BatchRecord record;
  record.samples = in.get<std::int64_t>();
  record.tokens = in.get<std::int64_t>();
  record.seconds = in.get<double>();
  record.ended = in.get<std::uint32_t>();
  record.most_samples = in.get<std::uint32_t>();
  record.loss_names = in.get<std::uint32_t>();
  const auto flags = in.get<std::uint16_t>();
  for (std::size_t i = 0; i < std::size(kFlags); ++i) record.*kFlags[i] = (flags >> i & 1) != 0;
  record.losses.resize(in.get<std::uint16_t>());
  for (auto& loss : record.losses) loss = in.get<double>();
  for (auto i = record.losses.size(); i < kLeastLosses; ++i) in.get<double>();
  in.expect_end();
  return record;
}

BatchRecord together(messaging::Mailbox& mailbox, std::span<const base::Rank> members, const BatchRecord& own,
                     const base::Patience& patience) {
  const auto merge = [](const value::Value& low, const value::Value& high) -> value::Value {
    return to_bytes(merged(to_record(low.as<std::string>()), to_record(high.as<std::string>())));
  };
  return to_record(mailbox.exchange(members, "batch", to_bytes(own), merge, patience).as<std::string>());
}

}  // namespace lamina::data_parallel
