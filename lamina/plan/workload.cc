// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/workload.h"

#include <algorithm>
#include <span>
#include <tuple>
#include <utility>

namespace lamina::plan {
namespace {

constexpr double kWeightShare = 0.45;  // of a backward its weight part, where unknown; in blocks of GPT 0.39 to 0.49
constexpr int kNone = -1;

std::int64_t ticks(double time_us) { return static_cast<std::int64_t>(kTicksPerMicrosecond * time_us); }

// A call of a module elsewhere than its caller; the first one is the step body. Callers come before their calls.
struct RemoteCall {
  int rank = 0;
  int caller = kNone;
  int first = kNone, last = kNone;  // its pieces
  int calls_from = kNone;           // the piece of its caller after which it begins
  int goes_on_to = kNone;           // the piece of its caller after whose backward its own begins
  bool waited_for = false;          // its caller's backward waits for it
  bool reported = false;            // somebody waits for the end of its backward
  std::vector<int> called = {};     // those that it has called since its last piece began
};

// A value on its way from the point that makes it to one that reads it.
struct Flow {
  int maker = 0, reader = 0;  // points; as many as there are: the loss
  std::int64_t bytes = 0;
  bool trained = false;        // it has a gradient
  std::vector<int> into = {};  // the calls that it enters, the outermost first
  std::vector<int> from = {};  // the calls that it leaves, the outermost first
};

// A message for a pass of a piece, and what it carries.
struct Notice {
  int from = 0;
  std::int64_t bytes = 0;
  bool is_value = false;  // else it only says how far its sender is
};

class WorkBuilder {
 public:
  WorkBuilder(const Route& route, const Assignment& owners, const Goal& goal)
      : route_(route), link_(goal.link), loss_(static_cast<int>(route.points.size())), loads_(goal.partitions) {
    find_calls(owners);
    find_flows();
    if (join_neighbours()) find_flows();
  }

  PlannedWork run() {
    for (const Flow& flow : flows_) {
      if (flow.from.empty() && flow.trained) calls_[flow.into.front()].waited_for = true;
    }
    add_piece(0);
    auto flow = flows_.begin();
    for (int at = 0; at < loss_; ++at) {
      const auto first = flow;
      while (flow != flows_.end() && flow->reader == at) ++flow;
      compute(at, {first, flow});
    }
    leave_for(0);
    piece_of_.push_back(add_piece(0));
    for (const Flow& each : flows_) send(each);
    for (int call = 1; call < static_cast<int>(calls_.size()); ++call) report(calls_[call]);
    for (int at = 0; at < static_cast<int>(pieces_.size()); ++at) deliver(at);
    return {{.pieces = std::move(pieces_)}, std::move(loads_)};
  }

 private:
  void find_calls(const Assignment& owners) {
    std::vector<int> remote;  // per call of the route, that in which it runs
    for (const RouteCall& call : route_.calls) {
      const int caller = call.caller < 0 ? kNone : remote[call.caller];
      const int rank = caller == kNone ? 0 : static_cast<int>(owners[call.node].value);
      if (caller == kNone || calls_[caller].rank != rank) {
        remote.push_back(static_cast<int>(calls_.size()));
        calls_.push_back({.rank = rank, .caller = caller});
      } else {
        remote.push_back(caller);
      }
    }
    if (calls_.empty()) calls_.emplace_back();
    for (const Point& point : route_.points) call_of_.push_back(remote[point.call]);
    call_of_.push_back(0);
  }

  // The call and those in which it was made, but the body, from outside.
  std::vector<int> around(int call) const {
    std::vector<int> path;
    for (; call > 0; call = calls_[call].caller) path.push_back(call);
    std::ranges::reverse(path);
    return path;
  }

  bool is_in(int call, int other) const {
    while (call != other && call != kNone) call = calls_[call].caller;
    return call == other;
  }

  void find_flows() {
    flows_.clear();
    trained_.clear();
    // Where no backward takes time, nothing is known of gradients.
    const bool unknown = std::ranges::none_of(route_.points, [](const Point& point) { return point.backward_us > 0; });
    for (int at = 0; at < loss_; ++at) {
      const Point& point = route_.points[at];
      bool trained = unknown || point.backward_us > 0;
      for (const RouteSource& source : point.reads) {
        trained = trained || trained_[source.point];
        add_flow(source, at);
      }
      trained_.push_back(trained);
    }
    for (const RouteSource& source : route_.results) add_flow(source, loss_);
  }

  void add_flow(const RouteSource& source, int reader) {
    if (call_of_[source.point] == call_of_[reader]) return;
    std::vector<int> into = around(call_of_[reader]);
    std::vector<int> from = around(call_of_[source.point]);
    const auto common = std::ranges::mismatch(into, from).in1 - into.begin();
    into.erase(into.begin(), into.begin() + common);
    from.erase(from.begin(), from.begin() + common);
    flows_.push_back({source.point, reader, source.bytes, trained_[source.point], std::move(into), std::move(from)});
  }

  // Has a call that follows another on its rank be a part of it, where it alone reads what that one has made, and waits
  // for nobody else.
  bool join_neighbours() {
    std::vector<std::vector<int>> readers(calls_.size());  // calls beside it; kNone: others
    std::vector<std::vector<int>> makers(calls_.size());
    for (const Flow& flow : flows_) {
      for (const int call : flow.from) {
        const bool beside = call == flow.from.front() && !flow.into.empty();
        readers[call].push_back(beside ? flow.into.front() : kNone);
      }
      for (const int call : flow.into) makers[call].push_back(call_of_[flow.maker]);
    }
    std::vector<int> joined(calls_.size());
    for (int call = 0; call < static_cast<int>(joined.size()); ++call) joined[call] = call;
    const auto joins = [&](int call, int before) {
      const RemoteCall& one = calls_[before];
      const RemoteCall& other = calls_[call];
      if (before == 0 || one.rank != other.rank || one.caller != joined[other.caller]) return false;
      const auto waits = [&](int maker) {
        maker = joined[maker];
        return !is_in(maker, before) && !is_in(before, maker) && std::ranges::count(makers[before], maker) == 0;
      };
      return std::ranges::all_of(readers[before], [&](int reader) { return reader == call; }) &&
             std::ranges::none_of(makers[call], waits);
    };
    bool any = false;
    std::vector<bool> begun(calls_.size());
    for (int at = 0; at < loss_; ++at) {
      const int call = call_of_[at];
      const int before = at > 0 ? joined[call_of_[at - 1]] : 0;
      if (call == 0 || begun[call] || call == before) {
        begun[call] = true;
        continue;
      }
      begun[call] = true;
      calls_[call].caller = joined[calls_[call].caller];
      if (!joins(call, before)) continue;
      any = true;
      joined[call] = before;
      readers[before] = std::move(readers[call]);
      makers[before].insert(makers[before].end(), makers[call].begin(), makers[call].end());
    }
    for (int& call : call_of_) call = joined[call];
    for (RemoteCall& call : calls_) {
      if (call.caller != kNone) call.caller = joined[call.caller];
    }
    return any;
  }

  int add_piece(int number) {
    RemoteCall& call = calls_[number];
    const int at = static_cast<int>(pieces_.size());
    pieces_.push_back({.work = {.rank = call.rank, .forward = 0, .backward = 0}, .before = call.last});
    forward_.emplace_back();
    backward_.emplace_back();
    awaits_.emplace_back();
    if (call.first == kNone) call.first = at;
    call.last = at;
    for (const int called : call.called) calls_[called].goes_on_to = at;
    call.called.clear();
    return at;
  }

  void enter(int call) {
    for (const int each : around(call)) {
      if (calls_[each].first != kNone) continue;
      const int caller = calls_[each].caller;
      if (calls_[each].waited_for && !calls_[caller].called.empty()) add_piece(caller);
      calls_[each].calls_from = calls_[caller].last;
      calls_[caller].called.push_back(each);
      add_piece(each);
    }
    open_ = call;
  }

  // Ends the calls that another one is not in. The backward of a call begins after its last piece.
  void leave_for(int call) {
    for (; !is_in(call, open_); open_ = calls_[open_].caller) {
      if (!calls_[open_].called.empty()) add_piece(open_);
    }
  }

  void compute(int at, std::span<const Flow> arriving) {
    const Point& point = route_.points[at];
    const int call = call_of_[at];
    leave_for(call);
    enter(call);
    int piece = calls_[call].last;
    std::vector<int> awaited;
    for (const Flow& flow : arriving) {
      if (flow.into.empty()) awaited.push_back(calls_[flow.from.back()].last);
    }
    const auto is_new = [&](int source) { return std::ranges::count(awaits_[piece], source) == 0; };
    const bool computes = pieces_[piece].work.forward + pieces_[piece].work.backward > 0;
    if (!calls_[call].called.empty() || (computes && std::ranges::any_of(awaited, is_new))) piece = add_piece(call);
    awaits_[piece].insert(awaits_[piece].end(), awaited.begin(), awaited.end());
    piece_of_.push_back(piece);
    leads_.push_back(std::ranges::any_of(point.reads, [&](const RouteSource& source) {
      return trained_[source.point] && (call_of_[source.point] != call || leads_[source.point]);
    }));
    const double weights_us =
        leads_[at] ? point.weights_us.value_or(kWeightShare * point.backward_us) : point.backward_us;
    schedule::Visit& work = pieces_[piece].work;
    work.forward += ticks(point.forward_us);
    work.backward += ticks(point.backward_us);
    work.weights += ticks(weights_us);
    loads_[work.rank].forward_us += point.forward_us;
    loads_[work.rank].backward_us += point.backward_us;
  }

  static void add_message(std::vector<Notice>& messages, const Notice& message) {
    const auto found = std::ranges::find(messages, message.from, &Notice::from);
    if (found == messages.end()) {
      messages.push_back(message);
    } else {
      found->bytes = std::max(found->bytes, message.bytes);
      found->is_value = found->is_value || message.is_value;
    }
  }

  void send(const Flow& flow) {
    const auto value = [&](int from, int to) { add_message(forward_[to], {from, flow.bytes, true}); };
    const auto gradient = [&](int from, int to) { add_message(backward_[to], {from, flow.bytes, true}); };
    const auto& [into, from] = std::tie(flow.into, flow.from);
    value(from.empty() ? calls_[into.front()].calls_from : calls_[from.back()].last,
          into.empty() ? piece_of_[flow.reader] : calls_[into.front()].first);
    for (std::size_t i = 1; i < into.size(); ++i) value(calls_[into[i]].calls_from, calls_[into[i]].first);
    if (!flow.trained) return;
    if (!into.empty()) calls_[into.back()].reported = true;
    gradient(into.empty() ? calls_[from.front()].goes_on_to : calls_[into.back()].first,
             from.empty() ? calls_[into.front()].calls_from : calls_[from.front()].last);
    for (std::size_t i = 1; i < from.size(); ++i) gradient(calls_[from[i]].goes_on_to, calls_[from[i]].last);
  }

  // The body ends when all calls have answered.
  void report(const RemoteCall& call) {
    if (call.first == kNone) return;
    add_message(forward_[call.first], {call.calls_from});
    add_message(backward_[call.last], {call.goes_on_to});
    if (!call.reported) add_message(backward_[0], {call.first});
  }

  void deliver(int at) {
    for (const auto& [messages, needs, time] :
         {std::tuple(&forward_[at], &pieces_[at].forward_needs, &schedule::Visit::forward),
          std::tuple(&backward_[at], &pieces_[at].backward_needs, &schedule::Visit::backward)}) {
      for (const Notice& message : *messages) {
        auto& sender = pieces_[message.from].work;
        auto& receiver = pieces_[at].work;
        const bool crosses = sender.rank != receiver.rank;
        needs->push_back({message.from, crosses ? ticks(link_.time_us(message.bytes)) : 0});
        if (!crosses || !message.is_value) continue;
        const double each_us = link_.rank_time_us(message.bytes);
        for (auto* const side : {&sender, &receiver}) {
          side->*time += ticks(each_us);
          if (time == &schedule::Visit::forward) loads_[side->rank].messages_us += each_us;
        }
        if (time == &schedule::Visit::forward) loads_[sender.rank].out_bytes += message.bytes;
      }
    }
  }

  const Route& route_;
  const Link& link_;
  const int loss_;
  std::vector<RankLoad> loads_;
  std::vector<RemoteCall> calls_;
  std::vector<int> call_of_;   // per point, and of the loss
  std::vector<bool> trained_;  // per point: what it makes has a gradient
  std::vector<bool> leads_;    // per point: its gradient leads out of its call
  std::vector<Flow> flows_;    // by reader
  std::vector<int> piece_of_;  // per point, and of the loss
  int open_ = 0;               // the innermost call
  std::vector<schedule::Piece> pieces_;
  std::vector<std::vector<Notice>> forward_, backward_;  // to each piece
  std::vector<std::vector<int>> awaits_;                 // per piece: those of which it reads results
};

}  // namespace

PlannedWork work_of(const Route& route, const Assignment& owners, const Goal& goal) {
  return WorkBuilder(route, owners, goal).run();
}

}  // namespace lamina::plan
