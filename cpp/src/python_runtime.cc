#include "python_runtime.h"

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

namespace llm_datadist {
namespace {
#define LLM_DATADIST_TEXT(x) #x
#define LLM_DATADIST_VERSION_TEXT(major, minor) LLM_DATADIST_TEXT(major) "." LLM_DATADIST_TEXT(minor) "."
constexpr const char kVersion[] = LLM_DATADIST_VERSION_TEXT(PY_MAJOR_VERSION, PY_MINOR_VERSION);

/** Keeps the thread state of a thread that Python did not make, so that later calls need not make it anew. */
class ThreadState {
 public:
  void Keep() noexcept {
    if (saved_ == nullptr && PyGILState_GetThisThreadState() == nullptr) {
      first_ = PyGILState_Ensure();
      saved_ = PyEval_SaveThread();
    }
  }

  ThreadState() = default;
  ThreadState(const ThreadState &) = delete;
  ThreadState &operator=(const ThreadState &) = delete;
  ~ThreadState() {
    if (saved_ != nullptr && Py_IsInitialized() != 0) {
      PyEval_RestoreThread(saved_);
      PyGILState_Release(first_);
    }
  }

 private:
  PyThreadState *saved_ = nullptr;
  PyGILState_STATE first_ = PyGILState_UNLOCKED;
};

/** A write to a peer that is gone must be an error, not the end of the process; a handler of the program is kept. */
void IgnoreBrokenPipes() {
  struct sigaction present = {};
  if (sigaction(SIGPIPE, nullptr, &present) == 0 && present.sa_handler == SIG_DFL) {
    (void)std::signal(SIGPIPE, SIG_IGN);
  }
}

bool StartInterpreter() {
  const char *python = std::getenv("LLM_DATADIST_PYTHON");
  if (python == nullptr || python[0] == '\0') {
    python = LLM_DATADIST_PYTHON;
  }
  PyConfig config;
  PyConfig_InitPythonConfig(&config);
  config.install_signal_handlers = 0;
  config.parse_argv = 0;
  PyStatus status = PyConfig_SetBytesString(&config, &config.program_name, python);
  if (PyStatus_Exception(status) == 0) {
    status = PyConfig_SetBytesString(&config, &config.executable, python);
  }
  if (PyStatus_Exception(status) == 0) {
    status = Py_InitializeFromConfig(&config);
  }
  PyConfig_Clear(&config);
  if (PyStatus_Exception(status) != 0) {
    const char *reason = status.err_msg == nullptr ? "unknown reason" : status.err_msg;
    (void)std::fprintf(stderr, "llm_datadist: cannot start Python (%s): %s\n", python, reason);
    return false;
  }
  (void)PyEval_SaveThread();
  return true;
}
}  // namespace

bool StartPython() noexcept {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  if (std::strncmp(Py_GetVersion(), kVersion, sizeof(kVersion) - 1U) != 0) {
    (void)std::fprintf(stderr, "llm_datadist: built for Python %s, the process has Python %s\n", kVersion,
                       Py_GetVersion());
    return false;
  }
  if (Py_IsInitialized() == 0 && !StartInterpreter()) {
    return false;
  }
  IgnoreBrokenPipes();
  return true;
}

Gil::Gil() noexcept : held_(Py_IsInitialized() != 0) {
  if (held_) {
    thread_local ThreadState thread_state;
    thread_state.Keep();
    state_ = PyGILState_Ensure();
  }
}

Gil::~Gil() {
  if (held_) {
    PyGILState_Release(state_);
  }
}
}  // namespace llm_datadist
