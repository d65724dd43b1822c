// SPDX-License-Identifier: Apache-2.0
#include "lamina/pipeline/job.h"

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <atomic>

#include "lamina/device/copies.h"
#include "lamina/device/failure.h"
#include "lamina/device/moment.h"
#include "lamina/faces/sayings.h"
#include "lamina/pipeline/step_messages.h"
#include "lamina/remote/anywhere.h"
#include "lamina/runtime/batch_norm.h"
#include "lamina/runtime/turn_times.h"
#include "lamina/schedule/schedule.h"
#include "lamina/verification/run_recorder.h"

namespace lamina::pipeline {
namespace {

using base::Deadline;

// After a failed step, how long a thread that is still in the user's code may take to notice before the error is
// raised without it.
constexpr auto kDrain = std::chrono::seconds(30);

// This limit holds when nothing comes after it: a rank was lost, the user is in a hurry, or the job is closed.
constexpr auto kLastWords = std::chrono::seconds(1);

base::Clock::duration to_duration(std::chrono::duration<double> span) {
  return std::chrono::duration_cast<base::Clock::duration>(span);
}

JobOptions checked(JobOptions options, base::Rank rank) {
  if (std::ranges::find(options.pipeline, rank) == options.pipeline.end()) {
    throw base::ConfigError(base::str("rank ", rank, " is not in its own pipeline"));
  }
  if (!options.failures) options.failures = std::make_shared<value::Failures>();
  return options;
}

// Reads the end of a step; throws the failure in it.
// Another rank's word on a step that failed may be what this one's own device has done to it.
EndOfStep well_ended(transport::Message&& message) {
  auto end = to_end_of_step(std::move(message));
  if (!end.failure) return end;
  if (const auto own = devices::failure()) std::rethrow_exception(own);
  throw value::RemoteFailure(*end.failure);
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

Job::Job(JobOptions options, messaging::Messenger& messenger, observe::Recorder& recorder)
    : options_(checked(std::move(options), messenger.rank())),
      messenger_(messenger),
      recorder_(recorder),
      microbatches_(options_.microbatches),
      all_microbatches_(std::int64_t{microbatches_} * options_.replicas),
      seeds_(options_.seed, std::int64_t{options_.replica} * microbatches_),
      watched_(std::make_shared<runtime::ParameterFlags::Watched>()),
      steps_(this->rank()),
      calls_(messenger.transport(), messenger.handlers(), steps_, to_duration(options_.timeout), options_.thread_hooks,
             /*predicts=*/!options_.deterministic),
      server_(messenger.transport(), messenger.handlers(), steps_, calls_, *options_.failures),
      pool_(std::make_unique<runtime::WorkerPool>(options_.thread_hooks)) {
  auto& handlers = messenger.handlers();
  handlers.on(kNewStep, [this](transport::Message&& message) {
    const auto begin = to_new_step(message);
    steps_.announce(begin.step, {begin.from, begin.call, begin.first_split});
  });
  handlers.on(kRefusal, [this](transport::Message&& message) {
    const auto refusal = to_refusal(std::move(message));
    steps_.refuse(refusal.step, refusal.why);
  });
  handlers.on(kTurn, [this](transport::Message&& message) {
    steps_.deliver(std::move(message),
                   [](remote::StepScope& step, transport::Message&& word) { step.slot().hear(to_pick(word)); });
  });
  handlers.on(kEndOfStep, [this](transport::Message&& end) { steps_.receive_end(std::move(end)); });
  keep_steps();
  messenger.watch({[this](base::Rank lost) { return known_of(lost); }, [this](const base::Loss& loss) { lose(loss); }});
}

Job::~Job() {
  messenger_.close(false);
  end(false);
}

void Job::join_team(std::vector<base::Rank> team, bool own_batches) {
  base::internal_check(!in_step(), "a team that a step begins without");
  team_ = std::move(team);
  if (own_batches) calls_.stop_predicting();
}

void Job::set_model(std::shared_ptr<model::Modules> modules, std::vector<base::Rank> owners) {
  modules_ = std::move(modules);
  owners_ = std::move(owners);
  server_.set_modules(call_hooks_.around(modules_));
}

void Job::set_order(remote::Tensors parameters, bool forwards_change_the_model) {
  base::internal_check(options_.deterministic, "set_order() of a job that is not deterministic");
  parameters_ = std::move(parameters);
  forwards_change_the_model_ = forwards_change_the_model;
  const auto step = steps_.open();
  if (!step) return;
  step->gradients->begin(parameters_);
  step->slot().follow(schedule());
}

void Job::watch_flags(std::vector<std::string> names, remote::Tensors tensors) {
  watched_ = std::make_shared<runtime::ParameterFlags::Watched>(std::move(names), std::move(tensors));
}

void Job::set_statistics(std::vector<runtime::BatchNorm> modules) {
  for (const auto& module : modules) runtime::note_inferences(module.mean.device());
  batch_norms_ = std::move(modules);
  if (const auto step = steps_.open(); step && overlaps()) step->statistics.begin(batch_norms_);
}

bool Job::overlaps() const {
  return !forwards_change_the_model_ && (options_.schedule == "simple" || options_.active_microbatches > 1);
}

void Job::set_microbatches(int microbatches) {
  share_out(std::int64_t{microbatches} * options_.replicas, /*alike=*/true);
}

void Job::share_out(std::int64_t all_microbatches, bool alike) {
  all_microbatches_ = all_microbatches;
  auto all = std::max<std::int64_t>(all_microbatches, options_.replicas);
  if (alike) all = (all + options_.replicas - 1) / options_.replicas * options_.replicas;
  const auto before = [&](int replica) { return all * replica / options_.replicas; };
  microbatches_ = static_cast<int>(before(options_.replica + 1) - before(options_.replica));
  seeds_.begin_at(before(options_.replica));
}

std::unique_ptr<schedule::Schedule> Job::schedule() const {
  if (forwards_change_the_model_) return schedule::interleaved_schedule(1);
  return schedule::make_schedule(options_.schedule, options_.active_microbatches,
                                 static_cast<int>(options_.pipeline.size()));
}

std::shared_ptr<remote::StepScope> Job::make_step(base::Step number, int microbatches,
                                                  std::shared_ptr<const runtime::ThreadState> thread_state) {
  auto step = std::make_shared<remote::StepScope>(
      *pool_, runtime::StepContext::Options{.number = number,
                                            .microbatches = microbatches,
                                            .turns = make_turns(),
                                            .timeout = to_duration(options_.timeout),
                                            .thread_state = std::move(thread_state),
                                            .watched = watched_,
                                            .recorder = &recorder_});
  step->pipeline = options_.pipeline;
  if (leads() && !alone()) step->first_split = schedule()->first_split(microbatches);
  step->slot().when_picked([this, number](const schedule::Pick& word) { tell_team(number, word); });
  if (options_.few_processors) step->slot().stay_on_one_processor();
  step->slot().when_idle([this] { messenger_.transport().look_out(); });
  if (options_.deterministic) step->gradients.emplace().begin(parameters_);
  if (overlaps() && microbatches > 1) step->statistics.begin(batch_norms_);
  return step;
}

schedule::TeamTurns Job::make_turns() const {
  using schedule::TeamTurns;
  if (team_.empty()) return TeamTurns::alone(schedule());
  return team_.front() == rank() ? TeamTurns::of_first(schedule()) : TeamTurns::of_another();
}

void Job::tell_team(base::Step step, const schedule::Pick& word) {
  for (const auto other : team_) {
    if (other == rank()) continue;
    try {
      messenger_.transport().tell(other, to_message(step, rank(), word));
    } catch (const base::PeerError&) {
      // Its pipeline, and who waits for it in a collective, hear of that.
    }
  }
}

void Job::require_same_turns(remote::StepScope& step) const {
  const auto parting = step.slot().parting();
  if (!parting) return;
  throw base::DesyncError(
      base::str("rank ", team_.front(), " and rank ", rank(), ", whose collectives have one order, ran different code ",
                "in step ", step.number(), ": ", parting->what(),
                "; what decides which code runs is to be the same on all ranks of a TP_GROUP, and of a sharding group "
                "without common memory: let no branch depend on the rank, or on data that only this rank has"),
      base::Code{"step-parted"});
}

base::Patience Job::patience_in(remote::StepScope& step, const StepSpec& spec) const {
  return {to_duration(options_.timeout), [this, &step, &spec] {
            if (spec.check_interrupt) spec.check_interrupt();
            require_same_turns(step);
            if (spec.check_others) spec.check_others();
          }};
}

StepResult Job::run_step(const StepSpec& spec) {
  if (!pool_) throw base::UsageError("a step of a job that was shut down", base::Code{"step-after-shutdown"});
  const auto began = recorder_.on() ? std::optional<devices::Moment>(std::in_place) : std::nullopt;
  std::optional<runtime::ProcessState> mine;  // which threads of a step that fails may change
  const auto thread_state = runtime::ThreadState::capture(options_.thread_hooks);
  const auto step = steps_.begin(
      [&](base::Step beginning) {
        auto made = make_step(beginning, spec.microbatches, thread_state);
        progress_.begin(beginning.value);
        seeds_.begin_step();
        mine = runtime::ProcessState::current();
        return made;
      },
      spec.call, leads());
  const auto number = step->number();
  const auto patience = patience_in(*step, spec);
  Ended ended;
  std::exception_ptr desync;  // it says why, where others who have met it may be gone before this rank's threads end
  try {
    if (leads()) announce(to_message(NewStep{number, rank(), spec.call, step->first_split}));
    messaging::MutualWaits::Scope scope(messenger_.mailbox().waits(), wait_for_end(*step));
    const auto watched = scope.watched(patience);
    if (!step->error()) ended = leads() ? lead(*step, spec, watched) : follow(*step, watched);
    if (leads() && !step->error()) {
      const auto& result = ended.result;
      const auto flags = runtime::ParameterFlags::to_bytes(ended.flags);
      announce(to_message(EndOfStep{number, rank(), result.outputs, result.backward, flags, {}, result.samples}));
    }
  } catch (const base::DesyncError&) {
    desync = std::current_exception();
    step->fail(desync);
  } catch (...) {
    step->fail(std::current_exception());
  }
  if (const auto first = first_call_.load()) first->end();
  if (step->error()) {
    announce_failure(*step);
    messenger_.transport().give_up_sends(number);
  }
  drain(*step, spec.check_interrupt);
  devices::join_arrivals();  // outputs of the rank that leads
  const auto error = desync ? desync : step->error();
  steps_.end();
  if (step->gradients) step->gradients->end(/*keep=*/!error);
  step->flags->end(error ? nullptr : ended.flags);
  step->statistics.end(/*keep=*/!error);
  step->close();
  first_call_.store(nullptr);
  mine->swap();
  progress_.end(number.value);
  if (began) {
    runtime::record(recorder_, {.what = observe::What::kStep, .step = number.value}, *began, devices::Moment());
  }
  error ? recorder_.save() : recorder_.save_sometimes();
  if (error) std::rethrow_exception(error);
  return std::move(ended.result);
}

StepResult Job::run_step_here(const StepSpec& spec) {
  using observe::What;
  const auto step = steps_here_++;
  const auto backwards_before = all_backwards();
  StepResult result{.samples = spec.samples};
  seeds_.begin_step();
  const Reported reported(progress_, step);
  const runtime::TurnSpan whole(recorder_, [&] { return observe::Event{.what = What::kStep, .step = step}; });
  for (int i = 0; i < spec.microbatches; ++i) {
    const base::Microbatch microbatch(i);
    {
      const runtime::TurnSpan turn(recorder_, [&] {
        return observe::Event{.what = What::kForward, .step = step, .microbatch = microbatch.value};
      });
      const runtime::InlineBody scope(seeds_.of(microbatch));
      if (options_.run_recorder) options_.run_recorder->begin_microbatch(microbatch);
      result.outputs.push_back(spec.body(microbatch));
    }
    if (recorder_.on()) runtime::record_memory(recorder_);
  }
  recorder_.save_sometimes();
  result.backward = saw_backward(spec, backwards_before);
  return result;
}

// Shared with the threads: after an error one of them may outlive the step.
struct Job::Bodies {
  std::vector<value::Value> outputs;
  std::atomic<int> ready = 0;
};

std::shared_ptr<Job::Bodies> Job::start_bodies(remote::StepScope& step, const StepSpec& spec) {
  auto bodies = std::make_shared<Bodies>();
  bodies->outputs.resize(spec.microbatches);
  const auto run = [body = spec.body, cut = spec.cut, first_call = first_call_.load()](base::Microbatch microbatch) {
    try {
      auto outputs = body(microbatch);
      if (first_call) first_call->ask(cut);
      return outputs;
    } catch (...) {
      if (first_call) first_call->ask(cut);  // the other ranks wait for the cut
      throw;
    }
  };
  for (int i = 0; i < spec.microbatches; ++i) {
    const base::Microbatch microbatch(i);
    step.run([this, &step, microbatch, seed = seeds_.of(microbatch), run, bodies] {
      runtime::ExecutionContext context(step, microbatch, schedule::Phase::kStart, seed);
      auto outputs = run(microbatch);
      value::for_each_tensor(outputs, value::materialise);
      context.end_body();
      auto& issued = remote::issued(context);
      issued.learn_views();
      context.retire();
      calls_.settle(context, issued.held({}));
      bodies->outputs[microbatch.value] = std::move(outputs);
      ++bodies->ready;
    });
  }
  return bodies;
}

Job::Ended Job::lead(remote::StepScope& step, const StepSpec& spec, const base::Patience& patience) {
  const auto backwards_before = all_backwards();
  const auto first = spec.cut ? std::make_shared<FirstCall>(step, to_duration(options_.timeout)) : nullptr;
  first_call_ = first;
  const auto bodies = start_bodies(step, spec);
  if (first) {
    step.wait(patience, rank(), [&] { return first->asked(); });
    if (step.error()) return {};
    if (!step.settled()) first->run();
  }
  step.wait_end(patience, rank(), [&] { return bodies->ready == spec.microbatches; });
  if (step.error()) return {};
  if (auto end = steps_.take_end()) {
    well_ended(std::move(*end));
    throw base::InternalError("another rank announced the outputs of the step that this rank leads");
  }
  return {{std::move(bodies->outputs), saw_backward(spec, backwards_before), spec.samples},
          step.flags->left_by(base::Microbatch(spec.microbatches - 1))};
}

bool Job::saw_backward(const StepSpec& spec, std::int64_t backwards_before) const {
  return all_backwards() != backwards_before || (spec.saw_backward && spec.saw_backward());
}

void Job::cut_here(std::function<void()> cut) {
  const auto first = first_call_.load();
  base::internal_check(first != nullptr, "a cut in another step than the first");
  first->ask(std::move(cut));
}

Job::Ended Job::follow(remote::StepScope& step, const base::Patience& patience) {
  step.wait_end(patience, options_.pipeline.front(), [] { return false; });
  auto end = step.error() ? std::nullopt : steps_.take_end();
  if (!end) return {};
  auto well = well_ended(std::move(*end));
  return {{std::move(well.outputs), well.backward, std::move(well.samples)}, step.flags->from_bytes(well.flags)};
}

void Job::announce_failure(const remote::StepScope& step) {
  const auto number = step.number();
  if (const auto refusal = steps_.refusal(); !refusal.empty()) {
    announce(to_message(Refusal{number, rank(), refusal}));
  }
  if (steps_.retracted()) return;
  try {
    announce(to_message(
        EndOfStep{number, rank(), {}, false, "", options_.failures->describe_to_send(step.error(), rank())}));
  } catch (const std::exception& unsent) {
    base::log_warning(base::str("the other ranks could not be told why step ", number, " ended: ", unsent.what()));
  }
}

void Job::announce(const transport::Message& message) {
  for (auto other : options_.pipeline) {
    if (other == rank() || (!leads() && other != options_.pipeline.front())) continue;
    try {
      auto& transport = messenger_.transport();
      transport::carries_tensors(message) ? transport.send(other, message) : transport.tell(other, message);
    } catch (const base::PeerError&) {
      // The rank is lost: its loss is, or will be, the error of a step of its own.
    } catch (const base::TimeoutError&) {
      // It takes nothing any more, and will meet its own deadline.
    }
  }
}

messaging::WaitOperation Job::operation(base::Step step) const {
  return {messaging::WaitKind::kStep, base::str(options_.pipeline.front()), step.value};
}

void Job::keep_steps() {
  using messaging::MutualWaits;
  const auto mine = [this](const messaging::WaitOperation& other) {
    return other.kind == messaging::WaitKind::kStep && other.key == base::str(options_.pipeline.front());
  };
  // Ranks of other pipelines ask, too: for a word of the first one of their team.
  const auto has_come = [this](const messaging::WaitOperation& other, base::Rank) {
    return steps_.latest().value >= other.number;
  };
  messenger_.mailbox().waits().keep(messaging::WaitKind::kStep, {has_come, nullptr});
  const auto begun = [this]() -> std::optional<messaging::WaitOperation> {
    const auto step = steps_.begun();
    return step ? std::optional(operation(*step)) : std::nullopt;
  };
  const auto ended = [this, mine](const messaging::WaitOperation& step) {
    if (mine(step)) steps_.skip(base::Step(step.number));
  };
  const auto role = [] {
    if (runtime::ExecutionContext::current() == nullptr) return MutualWaits::Role::kOutside;
    return runtime::ExecutionContext::has_process_state() ? MutualWaits::Role::kInTurn : MutualWaits::Role::kOutOfTurn;
  };
  messenger_.mailbox().waits().keep_steps({begun, ended, role});
}

// A step needs those who were asked for something. It needs the first rank of its team, too, where it waits to hear
// whose turn it is. One that follows needs the leading rank, first of all.
messaging::MutualWaits::Wait Job::wait_for_end(remote::StepScope& step) {
  const auto lacks = [this, &step]() -> std::vector<base::Rank> {
    if (!steps_.begun()) return {options_.pipeline.front()};
    auto awaited = step.calls.awaited();
    if (step.slot().awaits_pick()) awaited.push_back(team_.front());
    return awaited;
  };
  const auto call = [this, &step] {
    auto entered = steps_.entered();
    entered.name = base::str("step ", step.number(), entered.name.empty() ? "" : " of ", entered.name);
    return entered;
  };
  return {operation(step.number()),
          "a step",
          options_.pipeline,
          lacks,
          call,
          [this] { steps_.retract(); },
          /*absent=*/nullptr,
          [&step] { return step.slot().is_held(); }};
}

void Job::drain(remote::StepScope& step, const std::function<void()>& check_interrupt) {
  const auto wait = [&](const base::Patience& patience) {
    try {
      step.wait_idle(patience);
    } catch (const base::TimeoutError&) {
      steps_.fail_for_good(std::make_exception_ptr(
          base::UsageError(base::str("a thread of step ", step.number(),
                                     " did not end: the job can run no further step; start it again"),
                           base::Code{"step-unended"})));
    }
  };
  try {
    wait({steps_.failed_for_good() ? kLastWords : kDrain, check_interrupt});
  } catch (...) {  // interrupted, or what is done for the bodies meanwhile has failed, of which they are to hear
    step.fail(std::current_exception());
    const auto go_on = [&] {
      try {
        if (check_interrupt) check_interrupt();
      } catch (...) {  // the first error counts
      }
    };
    wait({kLastWords, go_on});
  }
}

value::Value Job::call(base::ModuleId id, value::Value arguments) {
  base::internal_check(modules_ != nullptr, "a module was called before the model was set");
  const auto placed = owners_.at(id.value);
  const auto owner = placed == remote::kAnywhere ? place_of(arguments).value_or(rank()) : placed;
  if (owner == rank()) {
    const auto stream =
        modules_->starts_rng_stream(id) ? runtime::rng_stream_here() : std::optional<runtime::RngStream>();
    return call_hooks_.call(*modules_, id, modules_->capture_state(id).state, std::move(arguments), /*remote=*/false);
  }
  if (runtime::ExecutionContext::current() == nullptr) {
    throw faces::refusal("called-elsewhere", modules_->name(id), owner);
  }
  return calls_.call(owner, id, *modules_, std::move(arguments));
}

void Job::backward(const remote::Tensors& tensors, const remote::Tensors& gradients, double scale) {
  runtime::ExecutionContext* context = runtime::ExecutionContext::current();
  if (context == nullptr || !context->leads()) {
    throw base::UsageError("backward of the model outside the body of a step function", base::Code{"step-outside"});
  }
  ++backwards_;
  context->end_forward();
  context->enter(schedule::Phase::kBackward);
  context->queue_again(schedule::Phase::kBackwardStart);
  if (!remote::scope_of(*context).splits(context->microbatch())) {
    return remote::run_backward(tensors, gradients, scale);
  }
  const auto weights = remote::run_input_part(tensors, gradients, scale);
  if (!weights) return;
  const auto over = c10::make_scope_exit([&] { context->enter(schedule::Phase::kBackward); });
  context->leave(schedule::Phase::kWeights);
  context->go_on();
  weights();
}

std::int64_t Job::steps() { return std::max(steps_.latest().value, steps_here_.load() - 1) + 1; }

bool Job::end(bool orderly) {
  if (!pool_) return true;
  const auto patience = orderly && !steps_.failed_for_good() ? kDrain : kLastWords;
  progress_.close();
  steps_.fail_for_good(
      std::make_exception_ptr(base::UsageError("the job was shut down", base::Code{"step-after-shutdown"})));
  try {
    steps_.wait_idle({patience, nullptr});
  } catch (const base::TimeoutError&) {
    return false;
  }
  pool_.reset();
  return true;
}

std::string Job::known_of(base::Rank lost) {
  std::string known;
  if (const auto asked = calls_.asked_of(lost); !asked.empty()) known += base::str(", ", asked);
  if (const auto asked = server_.latest_of(lost); !asked.empty()) known += base::str("; it asked last for ", asked);
  if (steps_.open()) {
    const auto [name, where, part] = steps_.entered();
    known += base::str("; this rank is in step ", steps_.latest(), name.empty() ? "" : " of ", name,
                       where.empty() ? "" : " at ", where);
  }
  const auto begun = steps();
  if (begun > 0) return known + base::str("; step ", begun - 1, " was the last one here");
  return options_.pipeline.size() > 1 ? known + "; no step had begun here" : known;  // a loop without step functions
}

void Job::lose(const base::Loss& loss) {
  if (loss.rank == rank()) {  // its own device has failed, as it has told all ranks
    if (const auto failure = devices::failure()) steps_.fail_for_good(failure);
    return;
  }
  if (std::ranges::find(options_.pipeline, loss.rank) == options_.pipeline.end()) return;
  // Only the leader knows what the loss of another follower means: a rank that leaves after its end of the step is no
  // loss.
  if (!leads() && loss.rank != options_.pipeline.front()) return;
  // One that has ended its program would do so again.
  const auto* const advice = messenger_.mailbox().waits().left(loss.rank).empty() ? "; start the job again" : "";
  steps_.fail_for_good(std::make_exception_ptr(base::PeerError(base::str(loss.text(), advice), loss)));
}

}  // namespace lamina::pipeline
