"""The environment variables that Spillway reads: for whom, values and default, effect.

`configuration.py` adds the files that read each variable. A test fails if the code reads a variable that is missing
here, or if nothing reads a variable of this table."""

LIBRARY, DEEPSPEED, MEGATRON, PRELOAD, STORE, BUILD = (
    "The library",
    "The Python package under DeepSpeed",
    "The Python package under Megatron",
    "The preload library",
    "Paths in an object store",
    "Build and tests",
)

# group, name, values and default, effect
VARIABLES = [
    (
        LIBRARY,
        "SPILLWAY_KERNEL",
        "`scalar`, `avx2`, `avx512`, `neon`, `sve` or `sve_bf16`; default: the fastest that the processor has",
        "Forces a kernel. If the processor lacks it, steps fail with `SPW_ERR_UNSUPPORTED`.",
    ),
    (
        LIBRARY,
        "SPILLWAY_NUM_THREADS",
        "a number from 1; default: usable processors divided by `LOCAL_WORLD_SIZE`",
        "Number of threads of a large step. `OMP_NUM_THREADS` has no effect.",
    ),
    (
        LIBRARY,
        "SPILLWAY_OPENMP",
        "`auto`, `0` or `1`; default: `auto`",
        "Whether large steps of the main thread are done by the OpenMP threads of torch or DeepSpeed's ops. `auto`: while other "
        "threads of the process use a processor between the steps, because OpenMP's threads then occupy the processors of the "
        "workers. Only if OpenMP has as many threads as the library. `0`: never. `1`: always.",
    ),
    (
        LIBRARY,
        "LOCAL_WORLD_SIZE",
        "a number from 1, set by launchers; default: 1",
        "Number of ranks on this machine, among which the usable processors are divided, unless the launcher has bound the rank.",
    ),
    (
        LIBRARY,
        "LOCAL_RANK",
        "a number below `LOCAL_WORLD_SIZE`, set by launchers",
        "The rank whose processors `spillway.topo.split` divides, unless the launcher has bound the rank.",
    ),
    (
        LIBRARY,
        "CUDA_VISIBLE_DEVICES",
        "numbers, UUIDs or MIG instances; default: all GPUs",
        "The GPUs that `spillway topo` and `spw_topo_*` count, if the CUDA driver is not asked.",
    ),
    (
        LIBRARY,
        "CUDA_DEVICE_ORDER",
        "`PCI_BUS_ID` or `FASTEST_FIRST`; default: `FASTEST_FIRST`",
        "Order of the numbers in `CUDA_VISIBLE_DEVICES`. With GPUs of different models only `PCI_BUS_ID` makes the order certain without "
        "the driver.",
    ),
    (
        LIBRARY,
        "SPILLWAY_LOG",
        "`error`, `warn`, `info` (or `1`) or `debug`; default: no output",
        "Log messages up to this level go to stderr, unless the program sets a log function.",
    ),
    (
        LIBRARY,
        "SPILLWAY_TURNS_DIR",
        "an existing directory; default: `/dev/shm`",
        "Where processes of a user see each other that take turns on a device. Containers of one machine mount the same one.",
    ),
    (
        LIBRARY,
        "SPILLWAY_IO_TURNS",
        "a number of processes; default: any",
        "Processes of a user that transfer to a device at a time, for I/O engines without this setting: those of DeepSpeed's `async_io` "
        "and `gds`. See tier.md.",
    ),
    (
        LIBRARY,
        "SPILLWAY_IO",
        "`uring` or `threads`; default: io_uring where the system allows it",
        "Forces the I/O backend of every engine.",
    ),
    (
        LIBRARY,
        "SPILLWAY_PROFILE",
        "a file; empty: no profile; default: in the user's cache directory, `spillway/io-profile` for file systems and "
        "`spillway/profile` for GPU links",
        "The settings that `spillway tune` and the measurement of a GPU link write, and that engines read. Empty: every "
        "call of `spw_gpu_measure_link` measures again.",
    ),
    (LIBRARY, "SPILLWAY_CUDA_LIBRARY", "a file; default: `libcuda.so.1`", "The CUDA driver library."),
    (LIBRARY, "XDG_CACHE_HOME", "a directory; default: `.cache` in `HOME`", "The user's cache directory, for the profile."),
    (LIBRARY, "HOME", "a directory", "Used if `XDG_CACHE_HOME` is not set."),
    (LIBRARY, "TMPDIR", "a directory; default: `/tmp`", "Holds these locks, and the records of `watch`, on a machine without `/dev/shm`."),
    (
        LIBRARY,
        "SPILLWAY_WATCH",
        "`0` or `1`; default: `1`",
        "`0`: the optimizers of the Python package publish no figures for `python -m spillway watch` and `metrics`.",
    ),
    (
        LIBRARY,
        "XDG_RUNTIME_DIR",
        "a directory",
        "Holds the locks with which processes take turns on a path, and the records of `watch`, if the shared memory directory cannot hold "
        "them.",
    ),
    (
        DEEPSPEED,
        "SPILLWAY_DEEPSPEED",
        "`1` or `require`; default: off",
        "`1` replaces DeepSpeed's ops in every Python process that inherits it. `require` also ends a process that "
        "imports DeepSpeed if the hook cannot be installed, or the library not loaded.",
    ),
    (
        DEEPSPEED,
        "SPILLWAY_DEEPSPEED_UNDO",
        "`auto`, `always` or `never`; default: `auto`",
        "Which steps are recorded, so that `adam_rollback` is exact. `auto`: SuperOffload's steps, and those of optimizers "
        "that were rolled back before.",
    ),
    (
        DEEPSPEED,
        "SPILLWAY_LIBRARY",
        "a file; default: `libspillway.so` in the package, or beside the preload library",
        "The library that the package loads, and the preload library for DeepSpeed's compiled optimizers.",
    ),
    (DEEPSPEED, "WORLD_SIZE", "a number, set by launchers", "With one rank, DeepSpeed's shared-memory collectives are not compiled."),
    (DEEPSPEED, "CXX", "a command; default: `c++`", "Without this compiler, DeepSpeed's shared-memory collectives are not compiled."),
    (DEEPSPEED, "PATH", "directories", "`python -m spillway.bench` adds the directory of its Python, where DeepSpeed looks for ninja."),
    (
        MEGATRON,
        "SPILLWAY_MEGATRON",
        "`1` or `require`; default: off",
        "`1` steps Megatron's CPU offload with Spillway in every Python process that inherits it. `require` also ends a process that "
        "imports Megatron if the hook cannot be installed, or the library not loaded.",
    ),
    (
        PRELOAD,
        "SPILLWAY_PRELOAD_FORWARD",
        "`1`; default: off",
        "Every call goes to the real libaio, and to DeepSpeed's own compiled functions.",
    ),
    (PRELOAD, "SPILLWAY_PRELOAD_ASYNC", "`1`; default: off", "Buffered transfers may still run after `io_submit` returns."),
    (STORE, "AWS_ENDPOINT_URL_S3", "a URL; default: `AWS_ENDPOINT_URL`, else Amazon's for the region", "Address of the store."),
    (STORE, "AWS_ENDPOINT_URL", "a URL", "Address of the store, if `AWS_ENDPOINT_URL_S3` is not set."),
    (
        STORE,
        "AWS_REGION",
        "a name; default: `AWS_DEFAULT_REGION`, else `us-east-1` with an own endpoint",
        "Region that requests are signed for.",
    ),
    (STORE, "AWS_DEFAULT_REGION", "a name", "Region, if `AWS_REGION` is not set."),
    (STORE, "AWS_ACCESS_KEY_ID", "required", "Access key."),
    (STORE, "AWS_SECRET_ACCESS_KEY", "required", "Secret key. It never appears in a message."),
    (STORE, "AWS_SESSION_TOKEN", "default: none", "Token of temporary credentials."),
    (STORE, "AWS_CA_BUNDLE", "a file; default: the system's certificates", "Certificates that the store's certificate is checked against."),
    (
        BUILD,
        "SPILLWAY_PREBUILT_LIB",
        "a file; default: cargo builds what is needed",
        "The library that goes into the wheel, with the preload library and the tool beside it.",
    ),
    (BUILD, "SPILLWAY_WHEEL_WITHOUT_TOOL", "`1`; default: off", "The wheel and the archive may lack the command line tool."),
    (BUILD, "SPILLWAY_CARGO_PROFILE", "a profile of cargo; default: `release`", "The profile that the wheel's binaries are built with."),
    (
        BUILD,
        "SPILLWAY_CARGO_FEATURES",
        "features of cargo, such as `spillway/s3`; default: none",
        "Features that cargo adds to the wheel's binaries.",
    ),
    (BUILD, "CARGO_TARGET_DIR", "a directory; default: `target`", "Where cargo builds."),
    (
        BUILD,
        "SPILLWAY_CACHE",
        "a directory; default: `spillway` in the user's cache directory",
        "Cache of the environments that tests, demo, docs and releases use.",
    ),
    (BUILD, "PYTHON", "a command; default: `python3`", "The interpreter from which environments and packages are made."),
    (BUILD, "LIBDIR", "a directory below the prefix; default: `lib`", "Where `make install` puts libraries."),
    (BUILD, "DESTDIR", "a directory; default: none", "`make install` writes below this directory, for packages."),
]
