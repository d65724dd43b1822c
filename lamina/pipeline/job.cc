// SPDX-License-Identifier: Apache-2.0
#include "lamina/pipeline/job.h"

#include <algorithm>
#include <atomic>

#include "lamina/pipeline/recording_transport.h"
#include "lamina/pipeline/step_messages.h"
#include "lamina/remote/anywhere.h"
#include "lamina/schedule/schedule.h"

namespace lamina::pipeline {
namespace {

using base::Deadline;

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

// True where a microbatch may begin before the one before it has ended.
bool overlaps(const JobOptions& options) {
  return options.schedule != "interleaved" || options.active_microbatches > 1;
}

// What is in the end of a step, whose failure is thrown.
EndOfStep well_ended(transport::Message&& message) {
  auto end = to_end_of_step(std::move(message));
  if (end.failure) throw value::RemoteFailure(*end.failure);
  return end;
}

// A step, to whoever watches this process, however it ends.
class Reported {
 public:
  Reported(const environment::ProgressReporter& reporter, std::int64_t step) : reporter_(reporter), step_(step) {
    reporter_.begin(step_);
  }
  ~Reported() { reporter_.end(step_); }
  Reported(const Reported&) = delete;

 private:
  const environment::ProgressReporter& reporter_;
  const std::int64_t step_;
};

// The rank that made the first of the arguments that is not here; see [Note: anywhere].
std::optional<base::Rank> place_of(const value::Value& arguments) {
  std::shared_ptr<remote::RemoteValue> source;
  value::for_each_tensor(arguments, [&](const at::Tensor& tensor) {
    if (!source && tensor.defined() && value::is_pending(tensor)) source = remote::remote_value_of(tensor);
  });
  if (!source || source->taken() || runtime::ExecutionContext::current() == nullptr) return std::nullopt;
  for (const auto& made : remote::issued(*runtime::ExecutionContext::current()).calls) {
    if (made->call->id == source->call()) return made->call->owner;
  }
  return std::nullopt;
}

}  // namespace

Job::Job(JobOptions options, std::unique_ptr<transport::Transport> transport)
    : options_(checked(std::move(options), transport->rank())),
      transport_(std::make_unique<RecordingTransport>(std::move(transport), recorder_)),
      seeds_(options_.seed, options_.microbatches_before),
      overlaps_(overlaps(options_)),
      slot_(schedule::make_schedule(options_.schedule, options_.active_microbatches), to_duration(options_.timeout),
            options_.thread_hooks.holds_interpreter_lock),
      calls_(*transport_, handlers_, inbox_, to_duration(options_.timeout), options_.thread_hooks,
             /*predicts=*/!options_.deterministic),
      server_(*transport_, handlers_, slot_, inbox_, calls_, *options_.failures,
              [this](base::Step step, runtime::StepState::Ready ready) { state_.run(step, std::move(ready)); }),
      mailbox_(*transport_, handlers_),
      pool_(std::make_unique<runtime::WorkerPool>(options_.thread_hooks)),
      state_(
          *pool_,
          [this] {
            slot_.cancel();
            inbox_.cancel();
            calls_.cancel();
          },
          this->rank()) {
  if (options_.deterministic) slot_.carry(&gradients_);
  slot_.carry(&flags_);
  slot_.carry(&statistics_);
  slot_.when_idle([this] { transport_->look_out(); });
  slot_.observe(&recorder_);
  handlers_.on(kNewStep, [this](transport::Message&& message) {
    const auto begin = to_new_step(message);
    state_.receive_begin(begin.step, begin.from, begin.call);
  });
  handlers_.on(kRefusal, [this](transport::Message&& message) {
    const auto refusal = to_refusal(std::move(message));
    state_.refuse(refusal.step, refusal.why);
  });
  handlers_.on(kEndOfStep, [this](transport::Message&& end) { state_.receive_end(std::move(end)); });
  keep_steps();
  if (!options_.timeline_part.empty()) recorder_.start_part(options_.timeline_part, empty_timeline());
  transport_->start({[this](transport::Message message) { handlers_.receive(std::move(message)); },
                     [this](base::Rank rank, const std::string& why) { lose(rank, why); }});
}

Job::~Job() { close(false); }

void Job::set_model(std::shared_ptr<model::Modules> modules, std::vector<base::Rank> owners) {
  modules_ = std::move(modules);
  owners_ = std::move(owners);
  server_.set_modules(call_hooks_.around(modules_));
}

void Job::set_order(remote::Tensors parameters, bool forwards_change_the_model) {
  if (!options_.deterministic) throw base::UsageError("set_order() of a job that is not deterministic");
  parameters_ = std::move(parameters);
  if (state_.is_open()) gradients_.begin_step(parameters_);
  slot_.follow(forwards_change_the_model ? schedule::interleaved_schedule(1)
                                         : schedule::make_schedule(options_.schedule, options_.active_microbatches));
  overlaps_ = !forwards_change_the_model && overlaps(options_);
}

void Job::set_statistics(std::vector<runtime::BatchNorm> modules) {
  batch_norms_ = std::move(modules);
  if (state_.is_open() && overlaps_) statistics_.begin_step(batch_norms_);
}

std::vector<value::Value> Job::run_step(int microbatches, const Body& body,
                                        const std::function<void()>& check_interrupt, const base::Call& call) {
  if (!pool_) throw base::UsageError("a step of a job that was shut down");
  const base::Patience patience{to_duration(options_.timeout), check_interrupt};
  std::optional<runtime::ProcessState> mine;  // which threads of a step that fails may change
  const std::int64_t began_ns = recorder_.on() ? observe::now_ns() : 0;  // requests may run before begin() returns
  const auto step = state_.begin(
      [&](base::Step beginning) {
        slot_.begin_step(microbatches);
        gradients_.begin_step(parameters_);
        flags_.begin_step();
        flags_left_ = nullptr;
        if (overlaps_ && microbatches > 1) statistics_.begin_step(batch_norms_);
        inbox_.begin_step();
        calls_.begin_step(beginning);
        seeds_.begin_step();
        mine = runtime::ProcessState::current();
      },
      call, leads());
  progress_.begin(step.value);
  std::vector<value::Value> outputs;
  try {
    if (leads()) announce(to_message(NewStep{step, rank(), call}));
    messaging::MutualWaits::Scope scope(mailbox_.waits(), wait_for_end(step));
    const auto watched = scope.watched(patience);
    if (!state_.error()) outputs = leads() ? lead(step, microbatches, body, watched) : follow(step, watched);
    if (leads() && !state_.error())
      announce(to_message(EndOfStep{step, rank(), outputs, runtime::ParameterFlags::to_bytes(flags_left_), {}}));
  } catch (...) {
    state_.fail(step, std::current_exception());
  }
  if (const auto refusal = state_.refusal(); !refusal.empty()) announce(to_message(Refusal{step, rank(), refusal}));
  if (const auto error = state_.error(); error && !state_.retracted()) {
    try {
      announce(to_message(EndOfStep{step, rank(), {}, "", options_.failures->describe_to_send(error, rank())}));
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
  const Reported reported(progress_, step);
  const observe::Span whole(&recorder_, [&] { return observe::Event{.what = What::kStep, .step = step}; });
  for (int i = 0; i < microbatches; ++i) {
    const base::Microbatch microbatch(i);
    {
      const observe::Span turn(&recorder_, [&] {
        return observe::Event{.what = What::kForward, .step = step, .microbatch = microbatch.value};
      });
      const runtime::InlineBody scope(seeds_.of(microbatch));
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
      runtime::ExecutionContext context(slot_, step, microbatch, schedule::Phase::kStart, seed);
      auto outputs = body(microbatch);
      value::for_each_tensor(outputs, value::materialise);
      context.end_body();
      calls_.learn_views(context);
      context.retire();
      calls_.settle(context, calls_.held(context, {}));
      results->outputs[microbatch.value] = std::move(outputs);
      ++results->ready;
    });
  }
  if (auto end = state_.wait_end(patience, rank(), [&] { return results->ready == microbatches; })) {
    well_ended(std::move(*end));
    throw base::FormatError("another rank announced the outputs of the step that this rank leads");
  }
  if (results->ready != microbatches) return {};  // it failed, and threads may still write
  flags_left_ = flags_.left_by(base::Microbatch(microbatches - 1));
  return std::move(results->outputs);
}

std::vector<value::Value> Job::follow(base::Step step, const base::Patience& patience) {
  auto end = state_.wait_end(patience, options_.pipeline.front(), [] { return false; });
  if (!end) return {};
  auto well = well_ended(std::move(*end));
  flags_left_ = flags_.from_bytes(well.flags);
  return std::move(well.outputs);
}

void Job::announce(const transport::Message& message) {
  for (auto other : options_.pipeline) {
    if (other == rank() || (!leads() && other != options_.pipeline.front())) continue;
    try {
      transport_->send(other, message);
    } catch (const base::PeerError&) {
      // The rank is lost: its loss is, or will be, the error of a step of its own.
    } catch (const base::TimeoutError&) {
      // It takes nothing any more, and will meet its own deadline.
    }
  }
}

messaging::MutualWaits::Operation Job::operation(base::Step step) const {
  return {messaging::MutualWaits::Kind::kStep, base::str(options_.pipeline.front()), step.value};
}

void Job::keep_steps() {
  using messaging::MutualWaits;
  const auto mine = [this](const MutualWaits::Operation& other) {
    return other.kind == MutualWaits::Kind::kStep && other.key == base::str(options_.pipeline.front());
  };
  const auto has_come = [this, mine](const MutualWaits::Operation& other, base::Rank) {
    return !mine(other) || state_.latest().value >= other.number;
  };
  mailbox_.waits().keep(MutualWaits::Kind::kStep, {has_come, nullptr});
  mailbox_.waits().keep_steps(
      [this]() -> std::optional<MutualWaits::Operation> {
        const auto begun = state_.begun();
        return begun ? std::optional(operation(*begun)) : std::nullopt;
      },
      [this, mine](const MutualWaits::Operation& ended) {
        if (mine(ended)) state_.skip(base::Step(ended.number));
      });
}

// A step needs those who were asked for something; one that follows needs the leading rank, first of all.
messaging::MutualWaits::Wait Job::wait_for_end(base::Step step) {
  const auto lacks = [this]() -> std::vector<base::Rank> {
    if (!state_.begun()) return {options_.pipeline.front()};
    return calls_.awaited();
  };
  const auto call = [this, step] {
    auto entered = state_.entered();
    entered.name = base::str("step ", step, entered.name.empty() ? "" : " of ", entered.name);
    return entered;
  };
  return {operation(step), "a step", options_.pipeline, lacks, call, [this] { state_.retract(); }};
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
  if (!state_.retracted()) {  // else what has come since belongs to the next one, which has this number
    server_.end_step(step);
    inbox_.end_step(step);
  }
  calls_.end_step();
  const auto error = state_.error();
  gradients_.end_step(/*keep=*/!error);
  flags_.end_step(error ? nullptr : flags_left_);
  statistics_.end_step(/*keep=*/!error);
  state_.end();
  return error;
}

value::Value Job::call(base::ModuleId id, value::Value arguments) {
  if (!modules_) throw base::UsageError("a module was called before the model was set");
  const auto placed = owners_.at(id.value);
  const auto owner = placed == remote::kAnywhere ? place_of(arguments).value_or(rank()) : placed;
  if (owner == rank()) {
    const auto stream = modules_->starts_rng_stream(id) ? runtime::rng_stream_here() : std::optional<runtime::RngStream>();
    return call_hooks_.call(*modules_, id, modules_->capture_state(id), std::move(arguments), /*remote=*/false);
  }
  if (runtime::ExecutionContext::current() == nullptr) {
    throw base::UsageError(base::str(modules_->name(id), " lives on rank ", owner,
                                     ": call it inside a step function, in the thread that runs the step's body"));
  }
  return calls_.call(owner, id, *modules_, std::move(arguments));
}

void Job::backward(const remote::Tensors& tensors, const remote::Tensors& gradients, double scale) {
  runtime::ExecutionContext* context = runtime::ExecutionContext::current();
  if (context == nullptr || !context->leads()) {
    throw base::UsageError("backward of the model outside the body of a step function");
  }
  context->end_forward();
  context->enter_backward();
  context->queue_again(schedule::Phase::kBackwardStart);
  remote::run_backward(tensors, gradients, scale);
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

void Job::tell_leaving(const std::string& how) {
  if (!pool_) return;
  const auto steps = std::max(state_.latest().value, steps_here_.load() - 1) + 1;
  mailbox_.waits().tell_leaving(base::str(how, " after ", steps, steps == 1 ? " step" : " steps"));
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
  progress_.close();
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

// The others know of the lost rank what they asked of it, and what it asked of them.
void Job::lose(base::Rank lost, const std::string& why) {
  std::string known;
  if (const auto asked = calls_.asked_of(lost); !asked.empty()) known += base::str(", ", asked);
  if (const auto asked = server_.latest_of(lost); !asked.empty()) known += base::str("; it asked last for ", asked);
  const auto step = std::max(state_.latest().value, steps_here_.load() - 1);
  if (const auto left = mailbox_.waits().left(lost); !left.empty()) known += base::str("; it ", left);
  if (state_.is_open()) {
    const auto [name, where, part] = state_.entered();
    known += base::str("; this rank is in step ", state_.latest(), name.empty() ? "" : " of ", name,
                       where.empty() ? "" : " at ", where);
  }
  known += step < 0 ? "; no step had begun here" : base::str("; step ", step, " was the last one here");
  // Which may be the cause of this loss.
  if (first_lost_) known += base::str("; rank ", *first_lost_, " was lost before");
  if (!first_lost_) first_lost_ = lost;
  const base::Loss loss{lost, why, known};
  mailbox_.lose(loss);
  if (std::ranges::find(options_.pipeline, lost) == options_.pipeline.end()) return;
  // What another follower's loss means is for the leader to say: one that left may have had its end of the step.
  if (!leads() && lost != options_.pipeline.front()) return;
  state_.lose(loss);
}

}  // namespace lamina::pipeline
