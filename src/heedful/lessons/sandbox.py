"""A sandbox made by the Linux kernel for the process in which an answer to an exercise runs.

Python's own hooks (limits.py) stop mistakes; code that calls the C library through ctypes does not pass them. The
kernel holds for every instruction of the process, and nothing in it can undo this:

    seccomp   refuses the system calls that write or change files, start processes, signal or inspect other processes,
              or open sockets; https://docs.kernel.org/userspace-api/seccomp_filter.html
    Landlock  refuses to change files whatever the call, to open what belongs to other processes under /proc, and (from
              Linux 6.12 on) to signal them; https://docs.kernel.org/userspace-api/landlock.html
    no capabilities, and no way to regain any (no_new_privs)

Reading files, threads, and memory within the limits stay possible. `confine_process` returns which of the two hold.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from typing import Any

PR_SET_NO_NEW_PRIVS, PR_CAPBSET_DROP, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 38, 24, 47, 4
CAPABILITY_VERSION_3 = 0x20080522
LANDLOCK_CREATE, LANDLOCK_RESTRICT = 444, 446  # the same on every architecture
LANDLOCK_WRITES = 0b1111_1111_1111_0010  # of the 16 rights, all but execute, read_file and read_dir
N_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # by the version of the interface; 16 from version 5 on
SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC = 1, 1

EPERM, ENOSYS = 1, 38
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
CLONE_THREAD = 0x10000
# Harmless requests of ioctl: whether a file is a terminal, its size, bytes that wait, close-on-exec, non-blocking.
IOCTLS = (0x5401, 0x5413, 0x541B, 0x5450, 0x5451, 0x5421)
FCNTLS = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX: signals to other processes

# Numbers on x86-64 and on ARM64 (None: it has none), by what they do.
Numbers = dict[str, tuple[int | None, int | None]]
PROCESSES: Numbers = {
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281), "unshare": (272, 97),
    "setns": (308, 268), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "kcmp": (312, 272), "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "setpriority": (141, 140), "ioprio_set": (251, 30), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "perf_event_open": (298, 241), "bpf": (321, 280), "userfaultfd": (323, 282),
}  # fmt: skip
FILES: Numbers = {
    "creat": (85, None), "truncate": (76, 45), "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None),
    "unlink": (87, None), "unlinkat": (263, 35), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276),
    "link": (86, None), "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36), "mknod": (133, None),
    "mknodat": (259, 33), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None),
    "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5),
    "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "flock": (73, 32), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "quotactl": (179, 60), "quotactl_fd": (443, 443), "swapon": (167, 224),
    "swapoff": (168, 225), "acct": (163, 89), "fanotify_init": (300, 262), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "io_setup": (206, 0), "io_submit": (209, 2),
}  # fmt: skip
OUTSIDE: Numbers = {
    "socket": (41, 198), "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190),
    "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189),
    "msgrcv": (70, 188), "msgctl": (71, 187), "mq_open": (240, 180), "mq_unlink": (241, 181), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219),
}  # fmt: skip
MISSING: Numbers = {"clone3": (435, 435), "openat2": (437, 437)}  # the C library then takes the older call
NEWEST = 462  # of the calls that were looked at; a newer one is not there
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
OPEN, OPENAT, CLONE, IOCTL, FCNTL = (2, None), (257, 56), (56, 220), (16, 29), (72, 25)
TO_A_PROCESS = {  # with the process in the first argument; its own are allowed
    "kill": (62, 129), "tgkill": (234, 131), "prlimit64": (302, 261), "sched_setaffinity": (203, 122),
    "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "sched_setattr": (314, 274),
}  # fmt: skip
ARGUMENTS = 16  # where in the data of a call its arguments begin


def confine_process() -> dict[str, bool]:
    """Confine this process for good, where the system can; whether Landlock and seccomp hold from now on."""
    if sys.platform != "linux":
        return {"landlock": False, "seccomp": False}
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return {"landlock": False, "seccomp": False}
    drop_capabilities(libc)
    return {"landlock": enforce_landlock(libc), "seccomp": enforce_seccomp(libc)}


def drop_capabilities(libc: ctypes.CDLL) -> None:
    """Give up what root may do beyond its own files."""
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    libc.capset(struct.pack("II", CAPABILITY_VERSION_3, 0), bytes(24))


def enforce_landlock(libc: ctypes.CDLL) -> bool:
    """Refuse all changes of files. It holds for this thread and those that it starts: there must be no others."""
    if n_threads() != 1:
        return False
    call = libc.syscall
    call.restype = ctypes.c_long
    version = call(LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    if version < 1:
        return False
    rights = LANDLOCK_WRITES & ((1 << N_RIGHTS.get(version, 16)) - 1)
    tcp, scopes = (3 if version >= 4 else 0), (3 if version >= 6 else 0)  # bind, connect; abstract sockets, signals
    rules = struct.pack("QQQ", rights, tcp, scopes)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = call(LANDLOCK_CREATE, rules, ctypes.c_size_t(len(rules)), ctypes.c_uint(0))
    if ruleset < 0:
        return False
    try:
        return bool(call(LANDLOCK_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint(0)) == 0)
    finally:
        os.close(ruleset)


def n_threads() -> int:
    """The threads of this process, those of C libraries too."""
    return len(os.listdir("/proc/self/task"))


def enforce_seccomp(libc: ctypes.CDLL) -> bool:
    """Refuse system calls, in all threads of this process."""
    column, architecture = ARCHITECTURES.get(platform.machine(), (-1, 0))
    if column < 0 or sys.byteorder != "little" or struct.calcsize("P") != 8:
        return False
    program = Program(column)
    program.check(architecture)
    code = program.assemble()
    buffer = ctypes.create_string_buffer(code, len(code))

    class Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))

    rules = Filter(len(code) // 8, ctypes.addressof(buffer))
    number = ctypes.c_long((317, 277)[column])
    done = libc.syscall(
        number, ctypes.c_uint(SECCOMP_SET_MODE_FILTER), ctypes.c_uint(SECCOMP_FILTER_FLAG_TSYNC), ctypes.byref(rules)
    )
    return bool(done == 0)


class Program:
    """A filter in classic BPF: instructions are (operation, skip if true, skip if false, operand)."""

    LOAD, JUMP_EQUAL, JUMP_GREATER, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x25, 0x45, 0x06

    def __init__(self, column: int) -> None:
        self.column = column
        self.lines: list[tuple[int, int, int, int]] = []

    def check(self, architecture: int) -> None:
        """The whole filter."""
        own = (0, os.getpid())
        self.add(self.LOAD, 4)  # the architecture: a process could make the calls of a 32-bit one
        self.add(self.JUMP_EQUAL, architecture, 1, 0)
        self.add(self.RETURN, KILL)
        self.add(self.LOAD, 0)  # the number of the call
        for call in (*PROCESSES.values(), *FILES.values(), *OUTSIDE.values()):
            self.refuse(call)
        for call in MISSING.values():
            self.refuse(call, ENOSYS)
        for call, flags in (OPEN, 1), (OPENAT, 2):
            self.refuse_argument(call, flags, lambda: self.add_refusal_if_bits(WRITING))
        self.refuse_argument(CLONE, 0, lambda: self.add_refusal_unless_bits(CLONE_THREAD))
        self.refuse_argument(IOCTL, 1, lambda: self.add_refusal_unless(IOCTLS))
        self.refuse_argument(FCNTL, 1, lambda: self.add_refusal_if(FCNTLS))
        for name, call in TO_A_PROCESS.items():
            # kill(0) is for the process group, which is this process alone; tgkill knows no 0.
            self.refuse_argument(
                call, 0, lambda name=name: self.add_refusal_unless(own[1:] if name == "tgkill" else own)
            )
        self.add(self.JUMP_GREATER, NEWEST, 0, 1)
        self.add(self.RETURN, REFUSE | ENOSYS)
        self.add(self.RETURN, ALLOW)

    def add(self, operation: int, operand: int, if_true: int = 0, if_false: int = 0) -> None:
        self.lines.append((operation, if_true, if_false, operand))

    def refuse(self, call: tuple[int | None, int | None], error: int = EPERM) -> None:
        """Refuse a call whatever its arguments."""
        if (number := call[self.column]) is not None:
            self.add(self.JUMP_EQUAL, number, 0, 1)
            self.add(self.RETURN, REFUSE | error)

    def refuse_argument(self, call: tuple[int | None, int | None], argument: int, add_refusals: Any) -> None:
        """Refuse a call by one of its arguments (the lower 32 bits, which are all that these calls read)."""
        if (number := call[self.column]) is None:
            return
        start = len(self.lines)
        self.add(self.LOAD, ARGUMENTS + 8 * argument)
        add_refusals()
        self.add(self.RETURN, ALLOW)
        self.lines.insert(start, (self.JUMP_EQUAL, 0, len(self.lines) - start, number))

    def add_refusal_if_bits(self, bits: int) -> None:
        self.add(self.JUMP_ANY_BIT, bits, 0, 1)
        self.add(self.RETURN, REFUSE | EPERM)

    def add_refusal_unless_bits(self, bits: int) -> None:
        self.add(self.JUMP_ANY_BIT, bits, 1, 0)
        self.add(self.RETURN, REFUSE | EPERM)

    def add_refusal_if(self, values: tuple[int, ...]) -> None:
        for value in values:
            self.add(self.JUMP_EQUAL, value, 0, 1)
            self.add(self.RETURN, REFUSE | EPERM)

    def add_refusal_unless(self, values: tuple[int, ...]) -> None:
        for value in values:
            self.add(self.JUMP_EQUAL, value, 0, 1)
            self.add(self.RETURN, ALLOW)
        self.add(self.RETURN, REFUSE | EPERM)

    def assemble(self) -> bytes:
        """The instructions as the kernel reads them."""
        return b"".join(struct.pack("HBBI", *line) for line in self.lines)
