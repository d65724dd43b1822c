// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/session.h"

#include <torch/version.h>
#include <unistd.h>

#include "lamina/base/log.h"
#include "lamina/contact/secret.h"
#include "lamina/device/capabilities.h"
#include "lamina/device/failure.h"
#include "lamina/device/rank_device.h"
#include "lamina/device/sharing.h"
#include "lamina/environment/address.h"
#include "lamina/environment/elastic_terms.h"
#include "lamina/environment/progress.h"
#include "lamina/environment/rank_contract.h"
#include "lamina/graph/current.h"
#include "lamina/messaging/relay.h"
#include "lamina/observe/timeline_part.h"
#include "lamina/rendezvous/master_address.h"
#include "lamina/rendezvous/place.h"
#include "lamina/rendezvous/places.h"
#include "lamina/runtime/execution_context.h"
#include "lamina/runtime/rng_streams.h"
#include "lamina/runtime/turn_times.h"
#include "lamina/session/chosen_device.h"
#include "lamina/session/epoch_talk.h"
#include "lamina/session/graph_links.h"
#include "lamina/session/lanes.h"
#include "lamina/session/witness_line.h"
#include "lamina/tensor_parallel/team.h"
#include "lamina/transport/loopback/loopback.h"
#include "lamina/transport/staging.h"
#include "lamina/transport/ucx/ucx.h"
#include "lamina/value/large_blocks.h"
#include "lamina/verification/run_recorder.h"

namespace lamina::session {
namespace {

using topology::Group;

std::chrono::seconds seconds(double span) { return std::chrono::seconds(static_cast<std::int64_t>(span) + 1); }

base::Clock::duration duration(double seconds) {
  return std::chrono::duration_cast<base::Clock::duration>(std::chrono::duration<double>(seconds));
}

// Ranks without which nobody of the job goes on, as its launchers say.
std::size_t least_ranks() {
  const auto terms = environment::ElasticTerms::read(environment::process_environment());
  return static_cast<std::size_t>(terms.value_or(environment::ElasticTerms()).least);
}

// Ranks of such a job outlive others.
bool is_elastic() { return environment::ElasticTerms::read(environment::process_environment()).has_value(); }

std::string type_of(at::Device device) { return c10::DeviceTypeName(device.type(), /*lower_case=*/true); }

// Ranks compare the type of their devices, for numbers are each one's own.
std::unique_ptr<transport::Transport> connect(config::Config config, const environment::World& world,
                                              const std::function<void()>& check_interrupt) {
  auto lends = asked_lending(environment::process_environment());
  if (world.size == 1) {
    contact::inherited_secret();  // is kept for a job that this process may join
    return std::make_unique<transport::Loopback>();
  }
  transport::UcxOptions options;
  options.rank = world.rank;
  options.size = world.size;
  options.master_addr = world.master_addr;
  options.master_port = world.master_port;
  config.device = type_of(devices::rank_device());
  options.configuration = config::to_json(config);
  options.send_timeout = seconds(config.timeout_s);
  if (const auto silence = config::silence_of(config, is_elastic())) {
    options.silence = std::chrono::duration_cast<std::chrono::milliseconds>(duration(*silence));
  }
  options.check_interrupt = check_interrupt;
  options.lends = std::move(lends);
  auto between_hosts = transport::open_ucx(options);
  if (devices::is_host(devices::rank_device())) return between_hosts;
  return std::make_unique<transport::StagingTransport>(std::move(between_hosts));
}

topology::Cuts cuts_of(const config::Config& config) {
  return {.shard = config.sharded_data_parallel_degree, .one_batch = config.prescaled_batch};
}

pipeline::JobOptions job_options(const config::Config& config, const topology::Topology& topology,
                                 const environment::World& world,
                                 std::shared_ptr<verification::RunRecorder> run_recorder, FaceHooks hooks) {
  const auto rank = world.rank;
  pipeline::JobOptions options;
  options.schedule = config::schedule_name(config.schedule);
  options.active_microbatches = *config.active_microbatches;
  options.deterministic = config.deterministic_server;
  options.timeout = std::chrono::duration<double>(config.timeout_s);
  if (config.seed) options.seed = static_cast<std::uint64_t>(*config.seed);
  options.microbatches = config.microbatches;
  options.replica = topology.index(topology::kReplicas, rank);
  options.replicas = topology.size(topology::kReplicas);
  options.pipeline = topology.members(topology::kPartitions, rank);
  options.few_processors = environment::available_cores() < 2 * world.local_size;
  options.run_recorder = std::move(run_recorder);
  options.thread_hooks = std::move(hooks.thread_hooks);
  options.failures = std::move(hooks.failures);
  return options;
}

graph::BorderOptions border_options(const config::Config& config, base::Rank rank, observe::Recorder& recorder) {
  return {.rank = rank,
          .schedule = config::schedule_name(config.schedule),
          .active_microbatches = *config.active_microbatches,
          .timeout = duration(config.timeout_s),
          .recorder = &recorder};
}

// The recorder of a run of `lamina verify`; nullptr in any other.
std::shared_ptr<verification::RunRecorder> record_run(const config::Config& config, const topology::Topology& topology,
                                                      base::Rank rank, int world) {
  auto terms = verification::read_terms(environment::process_environment());
  const bool takes_apart =
      config.partitions > 1 || config.tensor_parallel_degree > 1 || config.sharded_data_parallel_degree > 1;
  if (!terms && config.verify_steps > 0 && takes_apart) {
    terms = {.folder = "", .steps = config.verify_steps, .one_microbatch = true};
  }
  if (!terms) return nullptr;
  digests::RankRecording about{.rank = rank.value,
                               .world = world,
                               .copy = topology.index(topology::kReplicas, rank),
                               .partition = topology.index(topology::kPartitions, rank)};
  about.slices = topology.size(topology::Group::kTp);
  about.about = {{"configuration", config::to_json(config)}, {"torch", TORCH_VERSION}};
  return std::make_shared<verification::RunRecorder>(*terms, about);
}

// Ranks that compute on accelerators tell each other on which; collective over them.
void learn_devices(messaging::Mailbox& mailbox, const std::vector<base::Rank>& ranks, const environment::World& world,
                   const base::Patience& patience) {
  devices::set_shares_devices(false);
  if (ranks.size() == 1 || devices::is_host(devices::rank_device())) return;
  const auto own = devices::own_seat(world.node_rank);
  value::List seen;
  for (const auto& name : own.seen) seen.items.emplace_back(name);
  std::vector<devices::Seat> seats;
  for (const auto& word : mailbox.all_gather(ranks, value::Tuple{{own.machine, own.device, seen}}, patience)) {
    const auto& items = word.as<value::Tuple>().items;
    devices::Seat seat{items.at(0).as<std::int64_t>(), items.at(1).as<std::string>(), {}};
    for (const auto& name : items.at(2).as<value::List>().items) seat.seen.push_back(name.as<std::string>());
    seats.push_back(std::move(seat));
  }
  devices::set_shares_devices(devices::are_shared(seats));
  const auto told = devices::told_of_idle(seats);
  if (!told.empty() && world.rank == ranks.front()) base::log_warning(told);
}

// Throws base::CancelledError in a thread of a step that has ended.
void check_step() {
  const auto* context = runtime::ExecutionContext::current();
  if (context != nullptr && context->cancelled()) {
    throw base::CancelledError(base::str("step ", context->step().number(), " has ended"));
  }
}

using Blocking = decltype(runtime::WorkerPool::Hooks::blocking);

// A wait for tensors in a step gives the compute slot up, and ends with the step.
collective::JobLinks links_of(messaging::Messenger& messenger, observe::Recorder& recorder, Blocking blocking,
                              bool plain) {
  collective::JobLinks links{&messenger.mailbox(), &messenger.presence(), &recorder};
  if (!plain) links.transport = &messenger.transport();
  links.around_wait = [blocking = std::move(blocking)](const std::function<void()>& wait, bool keeps_turn) {
    auto* context = runtime::ExecutionContext::current();
    const bool keeps_slot = context == nullptr || keeps_turn;
    const auto without_slot = [&] { keeps_slot ? wait() : context->without_slot(context->phase(), wait); };
    blocking ? blocking(without_slot) : without_slot();
  };
  links.check_step = &check_step;
  return links;
}

}  // namespace

Session::Session(config::Config config, environment::World world, FaceHooks hooks, const FirstEpoch* first)
    : asked_(config::with_defaults(std::move(config))),
      config_(environment::is_newcomer() ? config::collapsed(asked_) : asked_),
      world_(rendezvous::placed(rendezvous::meeting_outside(std::move(world)), hooks.check_interrupt)),
      topology_(world_.size, config_.partitions, config_.tensor_parallel_degree, config_.placement_strategy,
                cuts_of(config_)),
      check_interrupt_(hooks.check_interrupt),
      call_(hooks.call),
      failures_(hooks.failures) {
  config::require_available(config_, topology_.size(topology::kReplicas));
  devices::set_rank_device(chosen_device(config_.device, world_.local_rank));
  if (config_.sharded_data_parallel_degree > 1) value::take_memory_from_large_blocks();
  collective::read_gather_limits(environment::process_environment());  // what is wrong there is told now
  if (world_.size > 1) base::set_log_name(base::str("rank ", world_.rank, "/", world_.size));
  // From `lamina run --timeline`.
  const auto environment = environment::process_environment();
  if (const auto folder = environment(observe::kPartsVariable); folder && !environment::is_newcomer()) {
    recorder_.start_part(observe::part_in(*folder, world_.rank.value), empty_timeline());
  }
  if (world_.local_size < world_.size) {
    environment::ProgressReporter().patience(std::chrono::duration_cast<std::chrono::milliseconds>(
        duration(config::silence_of(config_, is_elastic()).value_or(config_.timeout_s))));
  }
  environment::ProgressReporter().timeout(
      std::chrono::duration_cast<std::chrono::milliseconds>(duration(config_.timeout_s)));
  environment::ProgressReporter().joining(/*begins=*/true);
  messenger_ = std::make_unique<messaging::Messenger>(connect(config_, world_, check_interrupt_), recorder_);
  environment::ProgressReporter().joining(/*begins=*/false);
  messenger_->mailbox().waits().when_waiting(
      [progress = environment::ProgressReporter()](bool begins) { progress.waits(begins); });
  auto blocking = hooks.thread_hooks.blocking;
  parameter_server_ = std::make_unique<parameter_server::Service>(
      parameter_server::Options{duration(config_.timeout_s), hooks.thread_hooks, hooks.failures}, *messenger_);
  run_recorder_ = record_run(config_, topology_, world_.rank, world_.size);
  job_ = std::make_unique<pipeline::Job>(job_options(config_, topology_, world_, run_recorder_, std::move(hooks)),
                                         *messenger_, recorder_);
  share_out_microbatches();
  if (topology_.size(Group::kTp) > 1) job_->join_team(members(Group::kTp), /*own_batches=*/!config_.prescaled_batch);
  graphs_ = std::make_shared<GraphLinks>(border_options(config_, world_.rank, recorder_),
                                         members(topology::kPartitions), members(topology::kSameParts), *messenger_);
  for (const auto among : {graph::Among::kOneCopy, graph::Among::kCopies}) {
    graph::set_current(among, {graphs_, &graphs_->border(among)});
  }
  const bool plain = config_.ddp_dist_backend == config::DistBackend::kNccl;
  groups_ = std::make_unique<collective::Groups>(topology_, world_.rank,
                                                 links_of(*messenger_, recorder_, std::move(blocking), plain));
  messenger_->watch(
      {[](base::Rank) { return std::string(); }, [this](const base::Loss& loss) { groups_->lose(loss.rank); }});
  messenger_->start();
  devices::watch_failures([this](const std::string& what) { messaging::tell_failed(messenger_->transport(), what); });
  if (world_.local_size < world_.size) learn_nodes();
  if (is_elastic()) learn_seats();
  epochs_ = std::make_unique<EpochTalk>(mailbox(), transport(), least_ranks(), patience(), first_epoch(first));
  learn_devices(mailbox(), members(Group::kWorld), world_, patience());
}

bool needs_all_microbatches(const Session& session) {
  const auto& config = session.config();
  return config.sharded_data_parallel_degree > 1 || (config.tensor_parallel_degree > 1 && !config.prescaled_batch);
}

void Session::share_out_microbatches() {
  if (config_.all_microbatches == 0) return job_->set_microbatches(config_.microbatches);
  job_->share_out(config_.all_microbatches, needs_all_microbatches(*this));
}

Session::~Session() { close(false); }

// Each rank knows its own machine, and what its launcher was told: ranks of one that stand side by side become one
// line, a machine, their number, and that.
void Session::learn_nodes() {
  using value::List;
  const auto node = [](const value::Value& line) { return line.as<List>().items.at(0).as<std::int64_t>(); };
  const auto count = [](const value::Value& line) { return line.as<List>().items.at(1).as<std::int64_t>(); };
  const auto terms = [](const value::Value& line) { return line.as<List>().items.at(2).as<std::string>(); };
  const auto join = [&](value::Value low, const value::Value& high) -> value::Value {
    auto& lines = low.as<List>().items;
    for (const auto& line : high.as<List>().items) {
      if (node(line) == node(lines.back()) && terms(line) == terms(lines.back())) {
        lines.back() = List{{node(line), count(lines.back()) + count(line), terms(line)}};
      } else {
        lines.push_back(line);
      }
    }
    return low;
  };
  auto elastic = environment::process_environment()(environment::kElasticVariable).value_or("");
  if (const auto witness = WitnessLine::address()) elastic += " --witness " + *witness;
  const List own{{List{{std::int64_t{world_.node_rank}, std::int64_t{1}, elastic}}}};
  const auto all = mailbox().exchange(members(Group::kWorld), "machines", own, join, patience());
  auto cuts = cuts_of(config_);
  for (const auto& line : all.as<List>().items) {
    if (terms(line) != elastic) {
      const auto told = [](const std::string& said) { return said.empty() ? "none" : "--elastic " + said; };
      throw base::ConfigError(
          base::str("the launchers of this job are to be given the same --elastic and --witness: machine ",
                    world_.node_rank, " has ", told(elastic), ", and machine ", node(line), " ", told(terms(line))),
          base::Code{"elastic-refused"});
    }
    cuts.nodes.insert(cuts.nodes.end(), static_cast<std::size_t>(count(line)), static_cast<int>(node(line)));
  }
  topology_ = {world_.size, config_.partitions, config_.tensor_parallel_degree, config_.placement_strategy,
               std::move(cuts)};
}

void Session::learn_seats() {
  const auto own_address = environment::Address::local_towards(world_.master_addr, 1);
  const auto launcher = environment::process_environment()(environment::kDoorkeeperVariable);
  const value::Tuple own{{std::int64_t{world_.node_rank}, std::int64_t{::getpid()},
                          own_address.loopback() ? rendezvous::host_name() : own_address.host(),
                          launcher.value_or("")}};
  for (const auto& told : mailbox().all_gather(members(Group::kWorld), own, patience())) {
    const auto& items = told.as<value::Tuple>().items;
    seats_.push_back({static_cast<int>(items.at(0).as<std::int64_t>()),
                      static_cast<int>(items.at(1).as<std::int64_t>()), items.at(2).as<std::string>(),
                      items.at(3).as<std::string>()});
  }
}

FirstEpoch Session::first_epoch(const FirstEpoch* before) {
  std::vector<int> machines;
  for (const auto& seat : seats_) machines.push_back(seat.node);
  const auto silence = duration(config::silence_of(config_, /*outlives=*/true).value_or(config_.timeout_s));
  return FirstEpoch::learn(before, mailbox(), members(Group::kWorld), std::move(machines), silence, patience());
}

tensor_parallel::Team* Session::team() {
  if (team_ == nullptr && topology_.size(Group::kTp) > 1) {
    auto turn = turn_of_this_thread();
    turn.waits = [this] { transport().look_out(); };
    team_ = std::make_shared<tensor_parallel::Team>(groups_->get(Group::kTp, patience()), mailbox(),
                                                    patience_in_steps(), failures_, std::move(turn));
    tensor_parallel::note_team(team_name(), team_);
    when_closed([name = team_name()] { tensor_parallel::forget_team(name); });
  }
  return team_.get();
}

std::string Session::team_name() const { return tensor_parallel::team_name(world_.rank); }

collective::Ranks Session::ranks() {
  return {topology_, mailbox(), groups(), world_.rank, [this] { return patience(); }};
}

graph::Border& Session::graphs() { return graphs_->border(graph::Among::kOneCopy); }

base::Partition Session::partition() const {
  return base::Partition(topology_.index(topology::kPartitions, world_.rank));
}

base::Rank Session::owner(base::Partition partition) const {
  return topology_.translate(topology::kPartitions, static_cast<int>(partition.value), world_.rank);
}

void Session::require_everywhere(const std::string& what) const {
  if (topology_.size(topology::kPartitions) == 1 || !runtime::in_step()) return;
  throw base::UsageError(base::str(what,
                                   " inside a step function: only the rank that leads runs its body; call it before or "
                                   "after the step function, on every rank"),
                         base::Code{"step-leader-only"});
}

void Session::require_nobody_lost(const std::vector<base::Rank>& ranks, const std::string& what) {
  const auto loss = mailbox().loss(ranks, {});
  if (loss) throw base::PeerError(base::str(what, ": ", loss->text()), loss, base::Code{"group-lost"});
}

base::Patience Session::patience() const {
  base::Patience patience{duration(config_.timeout_s), check_interrupt_};
  if (!devices::is_host(devices::rank_device())) {
    patience.check_interrupt = [interrupt = check_interrupt_] {
      if (devices::is_failed()) std::rethrow_exception(devices::failure());
      if (interrupt) interrupt();
    };
  }
  patience.call = call_;
  return patience;
}

base::Patience Session::patience_in_steps() const {
  auto in_steps = patience();
  in_steps.check_interrupt = [interrupt = check_interrupt_] {
    if (interrupt) interrupt();
    check_step();
  };
  return in_steps;
}

collective::SameOrder::Turn Session::turn_of_this_thread() {
  return {[](const std::string& collective) {
            if (auto* context = runtime::ExecutionContext::current())
              context->note(schedule::TurnAct::kCollective, collective);
          },
          nullptr,
          [] {
            if (auto* context = runtime::ExecutionContext::current()) context->step().slot().note_long_wait();
          }};
}

observe::Timeline Session::empty_timeline() const {
  const auto leader = members(topology::kPartitions).front().value;
  return {config::schedule_name(config_.schedule),
          *config_.active_microbatches,
          {{.rank = world_.rank.value, .leader = leader}}};
}

void Session::start_timeline() {
  if (recorder_.keeps_events()) {
    throw base::UsageError("a timeline inside a timeline, or in a job that `lamina run --timeline` records whole");
  }
  recorder_.start(empty_timeline());
}

void Session::tell_leaving(const std::string& how) {
  if (!open_) return;
  const auto steps = job_->steps();
  mailbox().waits().tell_leaving(base::str(how, " after ", steps, steps == 1 ? " step" : " steps"));
}

bool Session::close(bool orderly) {
  if (open_) devices::watch_failures(nullptr);
  if (open_) messenger_->close(orderly);
  const bool ended = end(orderly);
  for (const auto& call : std::exchange(when_closed_, {})) {
    if (ended) call();
  }
  return ended;
}

bool Session::leave(bool interrupted) {
  if (open_ && interrupted) messenger_->transport().tell_interrupted();
  if (open_) messenger_->transport().give_up_sends(std::nullopt);
  if (open_) devices::watch_failures(nullptr);
  return end(/*orderly=*/false);
}

bool Session::end(bool orderly) {
  if (open_) {
    for (const auto among : {graph::Among::kOneCopy, graph::Among::kCopies}) graph::set_current(among, nullptr);
  }
  open_ = false;
  const bool served = parameter_server_->end();
  const bool ended = job_->end(orderly);
  runtime::record_passed();
  runtime::forget_turns(recorder_);
  recorder_.save();
  return served && ended;
}

}  // namespace lamina::session
