// SPDX-License-Identifier: Apache-2.0
#include "lamina/pipeline/job.h"

#include <algorithm>
#include <atomic>

#include "lamina/pipeline/anywhere.h"
#include "lamina/pipeline/recording_transport.h"
#include "lamina/plan/schedule.h"

namespace lamina::pipeline {
namespace {

using base::Deadline;
using transport::Kind;

// After a failed step, how long a thread that is still in the user's code may take to notice before the error is
// raised without it.
constexpr auto kDrain = std::chrono::seconds(30);

// The same when nothing comes after: a rank was lost, the user is in a hurry, or the job is closed.
constexpr auto kLastWords = std::chrono::seconds(1);

Deadline::Clock::duration to_duration(std::chrono::duration<double> span) {
  return std::chrono::duration_cast<Deadline::Clock::duration>(span);
}

JobOptions checked(JobOptions options, base::Rank rank) {
  if (std::ranges::find(options.pipeline, rank) == options.pipeline.end()) {
    throw base::ConfigError(base::str("rank ", rank, " is not in its own pipeline"));
  }
  if (!options.failures) options.failures = std::make_shared<value::Failures>();
  return options;
}

value::Value end_value(const std::vector<value::Value>& outputs) { return value::Tuple{{true, value::List{outputs}}}; }
value::Value end_value(const value::Failure& failure) { return value::Tuple{{false, value::to_value(failure)}}; }

// The outputs in the end of a step, or its failure, thrown.
std::vector<value::Value> outputs_of(transport::Message&& end) {
  auto& parts = end.body.as<value::Tuple>().items;
  if (parts.size() != 2) throw base::FormatError("an end of step without two parts");
  if (!parts[0].as<bool>()) throw value::RemoteFailure(value::to_failure(parts[1]));
  return std::move(parts[1].as<value::List>().items);
}

// The rank that made the first of the arguments that is not here; see [Note: anywhere].
std::optional<base::Rank> place_of(const value::Value& arguments) {
  std::shared_ptr<RemoteValue> source;
  value::for_each_tensor(arguments, [&](const at::Tensor& tensor) {
    if (!source && tensor.defined() && value::is_pending(tensor)) source = remote_value_of(tensor);
  });
  if (!source || source->taken() || Activity::current() == nullptr) return std::nullopt;
  for (const auto& made : Activity::current()->issued().calls) {
    if (made->call->id == source->call()) return made->call->owner;
  }
  return std::nullopt;
}

}  // namespace

Job::Job(JobOptions options, std::unique_ptr<transport::Transport> transport)
    : options_(checked(std::move(options), transport->rank())),
      transport_(std::make_unique<RecordingTransport>(std::move(transport), recorder_)),
      seeds_(options_.seed, options_.microbatches_before),
      slot_(plan::make_schedule(options_.schedule, options_.active_microbatches), to_duration(options_.timeout),
            options_.thread_hooks.holds_interpreter_lock),
      calls_(*transport_, inbox_, to_duration(options_.timeout), options_.thread_hooks,
             /*predicts=*/!options_.deterministic),
      server_(*transport_, slot_, inbox_, calls_, *options_.failures,
              [this](base::Step step, StepState::Ready ready) { state_.run(step, std::move(ready)); }),
      mailbox_(*transport_),
      pool_(std::make_unique<WorkerPool>(options_.thread_hooks)),
      state_(*pool_, [this] {
        slot_.cancel();
        inbox_.cancel();
        calls_.cancel();
      }) {
  if (options_.deterministic) slot_.carry(&gradients_);
  slot_.when_idle([this] { transport_->look_out(); });
  slot_.observe(&recorder_);
  if (!options_.timeline_part.empty()) recorder_.start_part(options_.timeline_part, empty_timeline());
  transport_->start({[this](transport::Message message) { receive(std::move(message)); },
                     [this](base::Rank rank, const std::string& why) { lose(rank, why); }});
}

Job::~Job() { close(false); }

void Job::set_model(std::shared_ptr<module::Modules> modules, std::vector<base::Rank> owners) {
  modules_ = std::move(modules);
  owners_ = std::move(owners);
  server_.set_modules(modules_);
}

void Job::set_order(Tensors parameters, bool forwards_change_the_model) {
  if (!options_.deterministic) throw base::UsageError("set_order() of a job that is not deterministic");
  parameters_ = std::move(parameters);
  if (state_.is_open()) gradients_.begin_step(parameters_);
  slot_.follow(forwards_change_the_model ? plan::interleaved_schedule(1)
                                         : plan::make_schedule(options_.schedule, options_.active_microbatches));
}

std::vector<value::Value> Job::run_step(int microbatches, const Body& body,
                                        const std::function<void()>& check_interrupt) {
  if (!pool_) throw base::UsageError("a step of a job that was shut down");
  const base::Patience patience{to_duration(options_.timeout), check_interrupt};
  std::optional<ProcessState> mine;  // which threads of a step that fails may change
  const std::int64_t began_ns = recorder_.on() ? observe::now_ns() : 0;  // requests may run before begin() returns
  const auto step = state_.begin([&](base::Step beginning) {
    slot_.begin_step(microbatches);
    gradients_.begin_step(parameters_);
    inbox_.begin_step();
    calls_.begin_step(beginning);
    seeds_.begin_step();
    mine = ProcessState::current();
  });
  progress_.begin(step.value);
  std::vector<value::Value> outputs;
  try {
    if (!state_.error()) outputs = leads() ? lead(step, microbatches, body, patience) : follow(step, patience);
    if (leads() && !state_.error()) announce_end(step, end_value(outputs));
  } catch (...) {
    state_.fail(step, std::current_exception());
  }
  if (const auto error = state_.error()) {
    try {
      announce_end(step, end_value(options_.failures->describe_to_send(error, rank())));
    } catch (const std::exception& unsent) {
      base::log_warning(base::str("the other ranks could not be told why step ", step, " ended: ", unsent.what()));
    }
  }
  const auto error = leave_step(step, check_interrupt);
  mine->swap();
  progress_.end(step.value);
  if (began_ns != 0) {
    recorder_.record(
        {.what = observe::What::kStep, .begin_ns = began_ns, .end_ns = observe::now_ns(), .step = step.value});
  }
  error ? recorder_.save() : recorder_.save_sometimes();
  if (error) std::rethrow_exception(error);
  return outputs;
}

void Job::run_step_here(int microbatches, const std::function<void(base::Microbatch)>& body) {
  using observe::What;
  const auto step = steps_here_++;
  seeds_.begin_step();
  const observe::Span whole(&recorder_, [&] { return observe::Event{.what = What::kStep, .step = step}; });
  for (int i = 0; i < microbatches; ++i) {
    const base::Microbatch microbatch(i);
    {
      const observe::Span turn(&recorder_, [&] {
        return observe::Event{.what = What::kForward, .step = step, .microbatch = microbatch.value};
      });
      const InlineBody scope(seeds_.of(microbatch));
      body(microbatch);
    }
    if (recorder_.on()) recorder_.record_memory();
  }
  recorder_.save_sometimes();
}

std::vector<value::Value> Job::lead(base::Step step, int microbatches, const Body& body,
                                    const base::Patience& patience) {
  // Shared with the threads: after an error one of them may outlive this call.
  struct Results {
    std::vector<value::Value> outputs;
    std::atomic<int> ready = 0;
  };
  auto results = std::make_shared<Results>();
  results->outputs.resize(microbatches);
  for (int i = 0; i < microbatches; ++i) {
    const base::Microbatch microbatch(i);
    state_.run([this, step, microbatch, seed = seeds_.of(microbatch), body, results] {
      Activity activity(slot_, step, microbatch, plan::Phase::kStart, seed);
      auto outputs = body(microbatch);
      value::for_each_tensor(outputs, value::materialise);
      activity.retire();
      calls_.settle(activity, calls_.held(activity, {}));
      results->outputs[microbatch.value] = std::move(outputs);
      ++results->ready;
    });
  }
  if (auto end = state_.wait_end(patience, rank(), [&] { return results->ready == microbatches; })) {
    outputs_of(std::move(*end));
    throw base::FormatError("another rank announced the outputs of the step that this rank leads");
  }
  if (results->ready != microbatches) return {};  // it failed, and threads may still write
  return std::move(results->outputs);
}

std::vector<value::Value> Job::follow(base::Step step, const base::Patience& patience) {
  auto end = state_.wait_end(patience, options_.pipeline.front(), [] { return false; });
  return end ? outputs_of(std::move(*end)) : std::vector<value::Value>();
}

void Job::announce_end(base::Step step, value::Value body) {
  transport::Message end;
  end.kind = Kind::kEndOfStep;
  end.call.step = step;
  end.call.origin = end.caller = rank();
  end.body = std::move(body);
  for (auto other : options_.pipeline) {
    if (other == rank() || (!leads() && other != options_.pipeline.front())) continue;
    try {
      transport_->send(other, end);
    } catch (const base::PeerError&) {
      // The rank is lost: its loss is, or will be, the error of a step of its own.
    } catch (const base::TimeoutError&) {
      // It takes nothing any more, and will meet its own deadline.
    }
  }
}

std::exception_ptr Job::leave_step(base::Step step, const std::function<void()>& check_interrupt) {
  const auto drain = [&](const base::Patience& patience) {
    try {
      state_.wait_idle(patience);
    } catch (const base::TimeoutError&) {
      state_.fail_for_good(std::make_exception_ptr(base::UsageError(
          base::str("a thread of step ", step, " did not end: the job can run no further step; start it again"))));
    }
  };
  try {
    drain({state_.failed_for_good() ? kLastWords : kDrain, check_interrupt});
  } catch (...) {  // interrupted, or what is done for the bodies meanwhile has failed, of which they are to hear
    state_.fail(step, std::current_exception());
    const auto go_on = [&] {
      try {
        if (check_interrupt) check_interrupt();
      } catch (...) {  // the first error counts
      }
    };
    drain({kLastWords, go_on});
  }
  server_.end_step(step);
  inbox_.end_step(step);
  calls_.end_step();
  const auto error = state_.error();
  gradients_.end_step(/*keep=*/!error);
  state_.end();
  return error;
}

value::Value Job::call(base::ModuleId id, value::Value arguments) {
  if (!modules_) throw base::UsageError("a module was called before the model was set");
  const auto placed = owners_.at(id.value);
  const auto owner = placed == kAnywhere ? place_of(arguments).value_or(rank()) : placed;
  if (owner == rank()) {
    const auto stream = modules_->starts_stream(id) ? stream_here() : std::optional<Stream>();
    return modules_->call(id, modules_->capture_state(id), std::move(arguments));
  }
  if (Activity::current() == nullptr) {
    throw base::UsageError(base::str(modules_->name(id), " lives on rank ", owner,
                                     ": call it inside a step function, in the thread that runs the step's body"));
  }
  return calls_.call(owner, id, *modules_, std::move(arguments));
}

void Job::backward(const Tensors& tensors, const Tensors& gradients, double scale) {
  Activity* activity = Activity::current();
  if (activity == nullptr || !activity->leads()) {
    throw base::UsageError("backward of the model outside the body of a step function");
  }
  activity->end_forward();
  activity->enter_backward();
  activity->queue_again(plan::Phase::kBackwardStart);
  run_backward(tensors, gradients, scale);
}

void Job::start_timeline() {
  if (recorder_.keeps_events()) {
    throw base::UsageError("a timeline inside a timeline, or in a job that `lamina run --timeline` records whole");
  }
  recorder_.start(empty_timeline());
}

observe::Totals Job::take_totals() {
  recorder_.start_counting();
  return recorder_.take_totals();
}

observe::Timeline Job::empty_timeline() const {
  const auto leader = options_.pipeline.front().value;
  return {options_.schedule, options_.active_microbatches, {{.rank = rank().value, .leader = leader}}};
}

bool Job::close(bool orderly) {
  const bool at_leisure = orderly && !state_.failed_for_good();
  if (pool_) transport_->close(orderly);
  return end(at_leisure ? kDrain : kLastWords);
}

bool Job::leave(bool interrupted) {
  if (pool_ && interrupted) transport_->tell_interrupted();
  return end(kLastWords);
}

bool Job::end(std::chrono::seconds patience) {
  if (!pool_) return true;
  state_.fail_for_good(std::make_exception_ptr(base::UsageError("the job was shut down")));
  try {
    state_.wait_idle({patience, nullptr});
  } catch (const base::TimeoutError&) {
    recorder_.save();
    return false;
  }
  pool_.reset();
  recorder_.save();
  return true;
}

void Job::receive(transport::Message&& message) {
  switch (message.kind) {
    case Kind::kForward:
    case Kind::kBackward:
    case Kind::kDeliver:
      return server_.receive(std::move(message));
    case Kind::kValues:
      return inbox_.arrive(message);
    case Kind::kResult:
    case Kind::kError:
      inbox_.arrive(message);
      return calls_.deliver(std::move(message));
    case Kind::kEndOfStep:
      return state_.receive_end(std::move(message));
    case Kind::kObject:
      return mailbox_.deliver(std::move(message));
  }
}

// The others know of the lost rank what they asked of it, and what it asked of them.
void Job::lose(base::Rank lost, const std::string& why) {
  std::string known = why;
  if (const auto asked = calls_.asked_of(lost); !asked.empty()) known += base::str(", ", asked);
  if (const auto asked = server_.latest_of(lost); !asked.empty()) known += base::str("; it asked last for ", asked);
  const auto step = std::max(state_.latest().value, steps_here_.load() - 1);
  known += step < 0 ? "; no step had begun here" : base::str("; step ", step, " was the last one here");
  // Which may be the cause of this loss.
  if (first_lost_) known += base::str("; rank ", *first_lost_, " was lost before");
  if (!first_lost_) first_lost_ = lost;
  mailbox_.lose(lost, known);
  if (std::ranges::find(options_.pipeline, lost) == options_.pipeline.end()) return;
  // What another follower's loss means is for the leader to say: one that left may have had its end of the step.
  if (!leads() && lost != options_.pipeline.front()) return;
  state_.lose(lost, known);
}

}  // namespace lamina::pipeline
