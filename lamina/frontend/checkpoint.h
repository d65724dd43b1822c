// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

// Checkpoints of a whole job: its model, its optimizers, random generators and what a program adds, by all ranks
// together. Their files are those of Python's save_checkpoint: docs/checkpoints.md.
namespace lamina {

namespace checkpoint {
class Save;
}

// Numbers, flags, texts, tensors, and lists, tuples and dictionaries of these, by name.
using UserContent = std::map<std::string, c10::IValue>;

// Tensors of a model's state, by name.
using StateDict = std::map<std::string, at::Tensor>;

struct SaveOptions {
  UserContent user_content;  // of rank 0
  // false: only the model, each tensor as a whole, as the folder `path`/`tag`, which Hugging Face's libraries load.
  bool partial = true;
  std::optional<int> num_kept_partial_checkpoints;  // so many of the folder stay, the latest; none: all
  bool asynchronous = false;                        // returns when what is saved is copied
};

// A checkpoint that is saved, or is being saved while training goes on.
class CheckpointHandle {
 public:
  explicit CheckpointHandle(std::shared_ptr<checkpoint::Save> save) : save_(std::move(save)) {}

  // True when it has ended, well or not.
  bool done() const;
  // Returns when the checkpoint is on the disk; throws what kept it from getting there, on every rank.
  void wait();

 private:
  std::shared_ptr<checkpoint::Save> save_;
};

// Saves model, optimizers, loss scale and random generators of the job as the checkpoint `path`/`tag`_partial. Every
// rank calls it, between steps, with one and the same folder. The checkpoint is there, whole and on the disk, or what
// was there before is. One that is asynchronous is waited for by the next save, by a resumption, by shutdown() and by
// wait(); what it failed with is thrown there or by the next step, on every rank.
//
// Throws the same on every rank. UsageError comes before the model is partitioned, inside a step function, between the
// backward passes of one reduction, and while another save of the same tag is under way. It also comes for content or
// states that have no place in a checkpoint, and a folder that a rank does not see or that has no room.
// base::FileError, with path and cause, comes where the file system refuses. PeerError and TimeoutError come as
// everywhere.
CheckpointHandle save_checkpoint(const std::filesystem::path& path, const std::string& tag,
                                 const SaveOptions& options = {});

struct ResumeOptions {
  std::optional<std::string>
      tag;  // none: the newest, or where that is damaged, which is said, the latest that is whole
  // false: a whole model, saved so, a folder of Hugging Face's, or a file of torch.save with a state dict, such as
  // pytorch_model.bin, of which only tensors are read.
  bool partial = true;
  bool strict = true;          // names of parameters and buffers have to be the same; else what is left out is told
  bool load_optimizer = true;  // states of optimizers, masters and the loss scale
  bool load_sharded_optimizer_state = true;  // false: as load_optimizer, where parameters are sharded
  bool verify = true;                        // compares all that is read with its checksums
  // With partial = false: makes a state with the model's names of the one that is read, which each rank then has as a
  // whole.
  std::function<StateDict(StateDict)> translate_function;
  bool missing_ok = false;  // where there is no such checkpoint nothing is loaded, which a line says
};

// Loads what save_checkpoint() has saved, here or in Python, in this layout or any other one. Every rank calls it, when
// the model and all optimizers are made. Before the model is partitioned the loaded values wait for that. The partition
// is then the saved one, where the number of partitions is the same. Nothing is changed on any rank unless all of it
// fits on all. With the layout of the checkpoint training goes on as if it had never ended.
//
// Returns the content that was saved; what a program in Python has saved that is no dictionary has the name "".
//
// Throws the same on every rank. UsageError comes where there is no such checkpoint, where names, shapes or groups do
// not fit, and inside a step function. FormatError, which names file and tensor, comes where it is damaged, and
// base::FileError where it cannot be read.
UserContent resume_from_checkpoint(const std::filesystem::path& path, const ResumeOptions& options = {});

}  // namespace lamina
