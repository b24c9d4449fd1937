// Enum values are frozen, every status has its name, and the version of the library is the header's.

#include "check.h"

#define FROZEN(name, value) _Static_assert((name) == (value), #name " never changes its value")
FROZEN(SPW_OK, 0);
FROZEN(SPW_ERR_INVALID_ARGUMENT, 1);
FROZEN(SPW_ERR_UNSUPPORTED, 2);
FROZEN(SPW_ERR_UNKNOWN_ID, 3);
FROZEN(SPW_ERR_LIMIT_REACHED, 4);
FROZEN(SPW_ERR_BUSY, 5);
FROZEN(SPW_ERR_INTERNAL, 9);
FROZEN(SPW_ERR_SYSTEM, 11);
FROZEN(SPW_ERR_IO, 20);
FROZEN(SPW_ERR_NO_SPACE, 21);
FROZEN(SPW_ERR_SHORT_FILE, 22);
FROZEN(SPW_ERR_TIMEOUT, 23);
FROZEN(SPW_ERR_CANCELLED, 24);
FROZEN(SPW_ERR_NOT_FOUND, 25);
FROZEN(SPW_ERR_DEADLINE, 26);
FROZEN(SPW_ERR_PATH_FAILED, 27);
FROZEN(SPW_ERR_NO_ROUND, 40);
FROZEN(SPW_ERR_ROUND_OPEN, 41);
FROZEN(SPW_ERR_ROUND_RESOLVED, 42);
FROZEN(SPW_ERR_BUCKET_MISSING, 43);
FROZEN(SPW_ERR_BUCKET_SUBMITTED, 44);
FROZEN(SPW_ERR_EVENT_BROKEN, 45);
FROZEN(SPW_UNDO_ARITHMETIC, 0);
FROZEN(SPW_UNDO_DELTA, 1);
FROZEN(SPW_DTYPE_NONE, 0);
FROZEN(SPW_DTYPE_F32, 1);
FROZEN(SPW_DTYPE_F16, 2);
FROZEN(SPW_DTYPE_BF16, 3);
FROZEN(SPW_WEIGHT_DECAY_DECOUPLED, 0);
FROZEN(SPW_WEIGHT_DECAY_L2, 1);
FROZEN(SPW_LOG_OFF, 0);
FROZEN(SPW_LOG_ERROR, 1);
FROZEN(SPW_LOG_WARN, 2);
FROZEN(SPW_LOG_INFO, 3);
FROZEN(SPW_LOG_DEBUG, 4);

static const char *name_of(int32_t status) {
    switch (status) {
        case SPW_OK: return "SPW_OK";
        case SPW_ERR_INVALID_ARGUMENT: return "SPW_ERR_INVALID_ARGUMENT";
        case SPW_ERR_UNSUPPORTED: return "SPW_ERR_UNSUPPORTED";
        case SPW_ERR_UNKNOWN_ID: return "SPW_ERR_UNKNOWN_ID";
        case SPW_ERR_LIMIT_REACHED: return "SPW_ERR_LIMIT_REACHED";
        case SPW_ERR_BUSY: return "SPW_ERR_BUSY";
        case SPW_ERR_INTERNAL: return "SPW_ERR_INTERNAL";
        case SPW_ERR_SYSTEM: return "SPW_ERR_SYSTEM";
        case SPW_ERR_IO: return "SPW_ERR_IO";
        case SPW_ERR_NO_SPACE: return "SPW_ERR_NO_SPACE";
        case SPW_ERR_SHORT_FILE: return "SPW_ERR_SHORT_FILE";
        case SPW_ERR_TIMEOUT: return "SPW_ERR_TIMEOUT";
        case SPW_ERR_CANCELLED: return "SPW_ERR_CANCELLED";
        case SPW_ERR_NOT_FOUND: return "SPW_ERR_NOT_FOUND";
        case SPW_ERR_DEADLINE: return "SPW_ERR_DEADLINE";
        case SPW_ERR_PATH_FAILED: return "SPW_ERR_PATH_FAILED";
        case SPW_ERR_NO_ROUND: return "SPW_ERR_NO_ROUND";
        case SPW_ERR_ROUND_OPEN: return "SPW_ERR_ROUND_OPEN";
        case SPW_ERR_ROUND_RESOLVED: return "SPW_ERR_ROUND_RESOLVED";
        case SPW_ERR_BUCKET_MISSING: return "SPW_ERR_BUCKET_MISSING";
        case SPW_ERR_BUCKET_SUBMITTED: return "SPW_ERR_BUCKET_SUBMITTED";
        case SPW_ERR_EVENT_BROKEN: return "SPW_ERR_EVENT_BROKEN";
        default: return "SPW_ERR_UNKNOWN";
    }
}

int main(void) {
    CHECK(spw_abi_version() == SPW_ABI_VERSION);
    CHECK(strcmp(spw_version(), SPW_VERSION) == 0);
    for (int32_t status = -1000; status < 1000; status++) {
        CHECK(strcmp(spw_status_name(status), name_of(status)) == 0);
    }
    CHECK(strcmp(spw_status_name(INT32_MAX), "SPW_ERR_UNKNOWN") == 0);
    CHECK(strcmp(spw_status_name(INT32_MIN), "SPW_ERR_UNKNOWN") == 0);
    return 0;
}
