// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "lamina/base/ids.h"
#include "lamina/transport/message.h"
#include "lamina/transport/transfer.h"

namespace lamina::transport {

// Messages with tensors between the ranks of one job. One implementation per folder below this one.
//
// Messages from one rank to another arrive in the order in which they were sent; nothing is promised about messages of
// different pairs. A rank may send to itself. Liveness is the transport's: it tells of a lost peer within 2 s of the
// end of its process, whether or not anything was being sent.
class Transport {
 public:
  // Called on the transport's own thread, one call at a time; they must not block or compute. Nothing may be thrown but
  // base::FormatError of a message: that one is dropped, with a warning, as what arrives malformed is.
  struct Events {
    std::function<void(Message)> message;
    // `why` is a clause such as "its process ended"; called once per lost rank. Messages it sent before arrive first.
    std::function<void(base::Rank, const std::string& why)> lost;
  };

  virtual ~Transport() = default;

  virtual base::Rank rank() const = 0;
  virtual int size() const = 0;

  // Begins delivery; called once. Messages that arrived earlier are delivered now.
  virtual void start(Events events) = 0;

  // Sends from any thread. When it returns, the message's tensors may be written again: they were copied, or taken by
  // the receiver. What is delivered is the receiver's private copy. Throws base::PeerError when `to` is lost, and
  // base::TimeoutError when a live peer does not take the message in time.
  virtual void send(base::Rank to, const Message& message) = 0;

  // As send(), of a message about a step that is packed already, with its buffers on the host.
  virtual void send_packed(base::Rank to, Frame frame, base::Step about) = 0;

  // Sends what carries no tensors, and waits for nobody: a peer that takes nothing any more takes this no more, either.
  // For words beside a wait that has its own deadline. Throws base::PeerError when `to` is lost.
  virtual void tell(base::Rank to, const Message& message) { send(to, message); }

  // Ends sends that wait, with base::CancelledError: of messages about this step and those before it; without one, of
  // all that still wait after a moment.
  virtual void give_up_sends(std::optional<base::Step> /*step*/) {}

  // Begin either end of a put, from any thread, and wait for nobody: see [Note: puts].
  virtual std::unique_ptr<Transfer> post(base::Rank from, Parcel parcel) = 0;
  virtual std::unique_ptr<Transfer> put(base::Rank to, Parcel parcel) = 0;

  // This rank has nothing to do before a message comes: look out for it for a moment, rather than sleep. From any
  // thread.
  virtual void look_out() {}

  // Says to the peers that this process is about to end, since it was interrupted (Ctrl-C): so they know why they lost
  // it. Before close().
  virtual void tell_interrupted() {}

  // Ends delivery: no event is running or will be called after it returns. With `orderly`, tells the peers that this
  // rank leaves on purpose, after what was sent has arrived (waiting a bounded time); else it just stops. Transfers
  // that have not ended are given up. Idempotent.
  virtual void close(bool orderly) = 0;
};

}  // namespace lamina::transport
