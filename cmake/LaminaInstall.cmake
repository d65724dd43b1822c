# SPDX-License-Identifier: Apache-2.0
# What the wheel holds besides the Python files: the engine, its plug-ins and the extension in the package's folder, the
# command among the scripts. The engine is found beside the extension, torch beside the package or where it was built.
if(LAMINA_TORCH)
  set(libraries lamina lamina_ucx _lamina)
  set_target_properties(${libraries} PROPERTIES
    INSTALL_RPATH "$ORIGIN;$ORIGIN/../torch/lib;${LIBTORCH_ROOT}/lib")
  install(TARGETS ${libraries} LIBRARY DESTINATION lamina COMPONENT python)
endif()

set(scripts bin)
if(SKBUILD)
  set(scripts ${SKBUILD_SCRIPTS_DIR})
endif()
install(TARGETS lamina_command RUNTIME DESTINATION ${scripts} COMPONENT python)
