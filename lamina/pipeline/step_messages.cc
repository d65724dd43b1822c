// SPDX-License-Identifier: Apache-2.0
#include "lamina/pipeline/step_messages.h"

#include "lamina/value/bytes.h"

namespace lamina::pipeline {
namespace {

using transport::Message;

base::CallId whole(base::Step step, base::Rank from) { return {from, step, transport::kWholeStep, 0}; }

}  // namespace

Message to_message(const NewStep& begin) {
  value::Writer out;
  out.put_block(begin.call.name);
  out.put_block(begin.call.where);
  out.put(begin.first_split);
  return {kNewStep, whole(begin.step, begin.from), out.take(), {}};
}

NewStep to_new_step(const Message& message) {
  NewStep begin{message.call.step, message.call.origin};
  value::Reader in(message.fields);
  begin.call.name = in.get_block();
  begin.call.where = in.get_block();
  begin.first_split = in.get<std::int64_t>();
  in.expect_end();
  return begin;
}

Message to_message(base::Step step, base::Rank from, const schedule::Pick& word) {
  const auto turn = word.turn.value_or(schedule::TurnName());
  value::Writer out;
  out.put(word.number);
  out.put<std::uint8_t>(word.goes_on);
  out.put<std::uint8_t>(word.turn.has_value());
  for (const auto part : {turn.microbatch.value, turn.caller.value, turn.call, turn.turn}) out.put<std::int64_t>(part);
  out.put(word.before.acts);
  out.put(word.before.collectives);
  out.put(word.before.hash);
  out.put_block(word.before.last);
  return {kTurn, whole(step, from), out.take(), {}};
}

schedule::Pick to_pick(const Message& message) {
  value::Reader in(message.fields);
  schedule::Pick word{.number = in.get<std::int64_t>()};
  word.goes_on = in.get<std::uint8_t>() != 0;
  const bool begins = in.get<std::uint8_t>() != 0;
  schedule::TurnName turn{base::Microbatch(in.get<std::int64_t>())};
  turn.caller = base::Partition(in.get<std::int64_t>());
  turn.call = in.get<std::int64_t>();
  turn.turn = in.get<std::int64_t>();
  if (begins) word.turn = turn;
  word.before.acts = in.get<std::int64_t>();
  word.before.collectives = in.get<std::int64_t>();
  word.before.hash = in.get<std::uint64_t>();
  word.before.last = in.get_block();
  in.expect_end();
  return word;
}

Message to_message(Refusal refusal) {
  return {kRefusal, whole(refusal.step, refusal.from), std::move(refusal.why), {}};
}

Refusal to_refusal(Message&& message) { return {message.call.step, message.call.origin, std::move(message.fields)}; }

Message to_message(EndOfStep end) {
  value::Writer out;
  out.put<std::uint8_t>(end.backward);
  out.put<std::uint64_t>(end.samples.size());
  for (const auto samples : end.samples) out.put(samples);
  out.put_block(end.flags);
  value::Value body = value::List{std::move(end.outputs)};
  if (end.failure) body = value::to_value(*end.failure);
  return {kEndOfStep, whole(end.step, end.from), out.take(), std::move(body)};
}

EndOfStep to_end_of_step(Message&& message) {
  EndOfStep end{message.call.step, message.call.origin, {}, false, {}, std::nullopt};
  value::Reader in(message.fields);
  end.backward = in.get<std::uint8_t>() != 0;
  for (auto left = in.get<std::uint64_t>(); left > 0; --left) end.samples.push_back(in.get<std::int64_t>());
  end.flags = in.get_block();
  in.expect_end();
  if (auto* outputs = message.body.get_if<value::List>()) {
    end.outputs = std::move(outputs->items);
  } else {
    end.failure = value::to_failure(message.body);
  }
  return end;
}

}  // namespace lamina::pipeline
