// Everything a generated kernel includes.
#pragma once

#include "kitsune/pipeline.h"
